"""Gemma 1 and 2, and what Gemma 3 shares: rotary positions, grouped heads, a gated MLP.

Gemma 2 adds post norms, soft caps and a window on every other block. All of it is read off the
block being opened. `query_head_dim_normalize=False`, which Gemma 2 27B needs, does not reach the
attention in KerasHub, and so has no effect here; opening warns of it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras_hub.src.models.gemma.gemma_decoder_block import GemmaDecoderBlock
from keras_hub.src.models.gemma.rms_normalization import RMSNormalization
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


class GemmaRotary(layers.Layer):
    """Rotate heads by position and lay the result out as Gemma does, halves interleaved.

    Args:
        rotary: the block's own `keras_hub.layers.RotaryEmbedding`.

    Call arguments:
        x: float[batch, time, heads, head_dim].
        positions: int32[batch, time].
    """

    def __init__(self, rotary, **kwargs):
        super().__init__(**kwargs)
        self.rotary = rotary

    def call(self, x, positions):
        x = self.rotary(x, positions=positions)
        return ops.reshape(ops.stack(ops.split(x, 2, axis=-1), axis=-1), ops.shape(x))

    def compute_output_spec(self, x, positions):
        return keras.KerasTensor(x.shape, self.compute_dtype)


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""

    def rotate(heads, name):
        layer = GemmaRotary(block.attention.rope_layer, dtype=block.dtype_policy, name=name)
        return layer(heads, positions)

    return open_gemma_block(block, hidden_states, padding_mask, rotate)


def open_gemma_block(
    block: Any, x: Any, padding_mask: Any, rotate: Callable[[Any, str], Any], **norms: Any
) -> Any:
    """Spell out one block of Gemma 1, 2 or 3; `rotate` and the norms are those of `attend`."""
    layer, policy = block.attention, block.dtype_policy
    windowed = layer.use_sliding_window_attention

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer.query_dense,
            key=layer.key_dense,
            value=layer.value_dense,
            output=layer.output_dense,
            scale=_scale(block),
            policy=policy,
            rotate=rotate,
            logit_soft_cap=layer.logit_soft_cap,
            sliding_window_size=layer.sliding_window_size if windowed else None,
            dropout=layer.dropout_layer if layer.dropout > 0 else None,
            **norms,
        )
        x = block.post_attention_norm(x) if block.use_post_attention_norm else x
        x = Site("attention_output")(x)
        return block.attention_dropout(x) if block.dropout else x

    def down(x):
        x = block.ffw_linear(x)
        return block.post_ffw_norm(x) if block.use_post_ffw_norm else x

    def mlp(x):
        gate, up = block.gating_ffw, block.gating_ffw_2
        return gated_mlp(x, gate, up, down, gelu_approximate, policy, upcast=False)

    return pre_norm(x, block.pre_attention_norm, attention, block.pre_ffw_norm, mlp, policy)


def _scale(block: Any) -> float:
    layer = block.attention
    if layer.query_head_dim_normalize and not block.query_head_dim_normalize:
        warnings.warn(
            "open: the backbone was made with `query_head_dim_normalize=False`, but its attention "
            f"scales queries by the head size {layer.head_dim} all the same (KerasHub does not "
            "pass the setting on). The opened graph does as the backbone does.",
            stacklevel=2,
        )
    width = layer.hidden_dim // layer.num_query_heads
    return float(1 / np.sqrt(layer.head_dim if layer.query_head_dim_normalize else width))


FAMILY = Family(
    name="gemma",
    block=GemmaDecoderBlock,
    open_block=open_block,
    pointwise_layers=(RMSNormalization,),
    model_types=("gemma", "gemma2"),
    model_type=lambda block: "gemma2" if block.use_post_ffw_norm else "gemma",
)
