"""Gemma 1 and 2: rotary positions, grouped heads, gated MLP.

Gemma 2 adds post norms, soft caps and a window on every other block. All of it is read off the
block being opened.
"""

import warnings

import keras
import numpy as np
from keras import layers, ops
from keras_hub.src.models.gemma.gemma_decoder_block import GemmaDecoderBlock
from keras_hub.src.models.gemma.rms_normalization import RMSNormalization
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.opening.attention import SelfAttention
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
    """Spell out one block: x + attention(norm(x)), then x + mlp(norm(x)), each perhaps normed."""
    x = Site("attention_norm")(block.pre_attention_norm(hidden_states))
    x = _attention(block, x, padding_mask, positions)
    if block.use_post_attention_norm:
        x = block.post_attention_norm(x)
    x = Site("attention_output")(x)
    if block.dropout:
        x = block.attention_dropout(x)
    x = layers.Add(dtype=block.dtype_policy, name="attention_residual")([hidden_states, x])
    residual = Site("residual_mid")(x)

    x = Site("mlp_norm")(block.pre_ffw_norm(residual))
    gate, x = block.gating_ffw(x), block.gating_ffw_2(x)
    x = GatedProduct(gelu_approximate, dtype=block.dtype_policy, name="gated_product")(gate, x)
    x = block.ffw_linear(Site("mlp_hidden")(x))
    if block.use_post_ffw_norm:
        x = block.post_ffw_norm(x)
    x = Site("mlp_output")(x)
    return layers.Add(dtype=block.dtype_policy, name="mlp_residual")([x, residual])


def _attention(block, x, padding_mask, positions):
    attention = block.attention
    policy = block.dtype_policy
    query = Site("query")(attention.query_dense(x))
    key = Site("key")(attention.key_dense(x))
    value = Site("value")(attention.value_dense(x))
    rotary = attention.rope_layer
    query = GemmaRotary(rotary, dtype=policy, name="query_rotary")(query, positions)
    key = GemmaRotary(rotary, dtype=policy, name="key_rotary")(key, positions)
    width = attention.hidden_dim // attention.num_query_heads
    if attention.query_head_dim_normalize and not block.query_head_dim_normalize:
        warnings.warn(
            f"open at '{block.name}': the backbone was made with `query_head_dim_normalize=False`, "
            f"but its attention scales queries by the head size {attention.head_dim} all the same "
            f"(KerasHub does not pass the setting on). The opened graph does as the backbone does.",
            stacklevel=2,
        )
    scaled_by = attention.head_dim if attention.query_head_dim_normalize else width
    window_size = attention.sliding_window_size if attention.use_sliding_window_attention else None
    x = SelfAttention(
        num_heads=attention.num_query_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=float(1 / np.sqrt(scaled_by)),
        logit_soft_cap=attention.logit_soft_cap,
        sliding_window_size=window_size,
        dropout=attention.dropout_layer if attention.dropout > 0 else None,
        dtype=policy,
        name="self_attention",
    )(query, key, value, padding_mask)
    return attention.output_dense(Site("head_outputs")(x))


FAMILY = Family(
    name="gemma",
    block=GemmaDecoderBlock,
    open_block=open_block,
    pointwise_layers=(RMSNormalization,),
    model_types=("gemma", "gemma2"),
    model_type=lambda block: "gemma2" if block.use_post_ffw_norm else "gemma",
)
