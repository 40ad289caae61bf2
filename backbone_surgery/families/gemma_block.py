"""The block of Gemma 1, 2 and 3: grouped heads, a gated MLP, and what Gemma 2 and 3 add."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm
from backbone_surgery.opening.site import Site


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


def refuse_gemma_block(block):
    """Say why a block of Gemma 3 or 4 cannot be opened, if it cannot."""
    if block.use_bidirectional_attention:
        return (
            "attention to earlier tokens alone. Received `use_bidirectional_attention=True`, with "
            "which a model embeds texts and generates none. Use a model that generates"
        )
    if block.compute_dtype == "float16":
        return (
            "another dtype than float16, in which KerasHub clips what this architecture computes. "
            "Received float16. Use bfloat16 or float32"
        )
    return None
