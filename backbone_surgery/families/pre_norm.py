"""What decoder blocks share: pre-norms, projections to heads, rotary positions, gated MLPs."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers
from keras_hub.src.utils.keras_utils import fused_attention_op_available

from backbone_surgery.families.parts import GatedProduct, PartialRotary
from backbone_surgery.opening.attention import SelfAttention
from backbone_surgery.opening.site import Site

Step = Callable[[Any], Any]
"""A layer, or a function that calls some."""


def pre_norm(
    x: Any, attention_norm: Step, attention: Step, mlp_norm: Step, mlp: Step, policy: Any
) -> Any:
    """Spell out x + attention(norm(x)), then x + mlp(norm(x)), with the sites around both.

    Args:
        x: float[batch, time, hidden_dim].
        attention_norm: the norm before attention.
        attention: attention, up to what is added to the stream; see `attend`.
        mlp_norm: the norm before the MLP.
        mlp: the MLP, up to what is added to the stream; see `gated_mlp`.
        policy: dtype policy of the block.
    """
    attended = attention(Site("attention_norm")(attention_norm(x)))
    x = layers.Add(dtype=policy, name="attention_residual")([attended, x])
    residual = Site("residual_mid")(x)
    x = mlp(Site("mlp_norm")(mlp_norm(residual)))
    return layers.Add(dtype=policy, name="mlp_residual")([x, residual])


def attend(
    x: Any,
    padding_mask: Any,
    *,
    query: Step,
    key: Step,
    value: Step,
    output: Step,
    scale: float,
    policy: Any,
    query_norm: Step | None = None,
    key_norm: Step | None = None,
    rotate: Callable[[Any, str], Any] | None = None,
    mixed_dropout: keras.layers.Dropout | None = None,
    gate: Step | None = None,
    **settings: Any,
) -> Any:
    """Spell out self-attention from its input to its output projection.

    Args:
        x: float[batch, time, hidden_dim].
        padding_mask: int[batch, time].
        query: from `x` to float[batch, time, num_heads, head_dim].
        key: from `x` to float[batch, time, num_key_value_heads, head_dim].
        value: likewise.
        output: from heads to float[batch, time, hidden_dim].
        scale: what query-key products are multiplied by.
        policy: dtype policy of the block.
        query_norm: norm of the queries, before they are rotated.
        key_norm: likewise, of the keys.
        rotate: `(heads, layer name) -> heads`, for queries and keys.
        mixed_dropout: the block's dropout of what attention mixed, before `output`.
        gate: what is done to what attention mixed, before the site `head_outputs`.
        **settings: of `SelfAttention`.
    """
    query_heads = Site("query")(query(x))
    key_heads = Site("key")(key(x))
    value_heads = Site("value")(value(x))
    if query_norm is not None and key_norm is not None:
        query_heads, key_heads = query_norm(query_heads), key_norm(key_heads)
    if rotate is not None:
        query_heads, key_heads = (
            rotate(query_heads, "query_rotary"),
            rotate(key_heads, "key_rotary"),
        )
    x = SelfAttention(
        num_heads=query_heads.shape[2],
        num_key_value_heads=key_heads.shape[2],
        head_dim=query_heads.shape[3],
        scale=float(scale),
        dtype=policy,
        name="self_attention",
        **settings,
    )(query_heads, key_heads, value_heads, padding_mask)
    if mixed_dropout is not None and mixed_dropout.rate > 0:
        x = mixed_dropout(x)
    x = x if gate is None else gate(x)
    return output(Site("head_outputs")(x))


def gated_mlp(
    x: Any, gate: Step, up: Step, down: Step, activation: Any, policy: Any, upcast: bool = True
) -> Any:
    """Spell out a gated MLP.

    Args:
        x: float[batch, time, hidden_dim].
        gate: to float[batch, time, intermediate_dim], for the activation.
        up: likewise, to be multiplied with it.
        down: back to float[batch, time, hidden_dim].
        activation: a function.
        policy: dtype policy of the block.
        upcast: whether the activation is computed in float32.
    """
    product = GatedProduct(activation, upcast=upcast, dtype=policy, name="gated_product")
    return Site("mlp_output")(down(Site("mlp_hidden")(product(gate(x), up(x)))))


def mlp_of(block: Any, x: Any, down: Step | None = None) -> Any:
    """Spell out the gated MLP of a block whose layers are named as Llama's; see `gated_mlp`."""
    return gated_mlp(
        x,
        block._feedforward_gate_dense,
        block._feedforward_intermediate_dense,
        down or block._feedforward_output_dense,
        block.activation,
        block.dtype_policy,
    )


def rotary(
    layer: keras.layers.Layer, positions: Any, features: int | None = None
) -> Callable[[Any, str], Any]:
    """Return `rotate` for a `keras_hub.layers.RotaryEmbedding` of the block.

    Args:
        layer: the embedding.
        positions: int32[batch, time].
        features: how many features of a head are rotated, the first ones; all by default.
    """

    def rotate(heads: Any, name: str) -> Any:
        if features in (None, heads.shape[-1]):
            return layer(heads, positions=positions)
        return PartialRotary(layer, features, dtype=layer.dtype_policy, name=name)(heads, positions)

    return rotate


def unfused(window: int | None) -> int | None:
    """Return the window that KerasHub applies: none where attention is fused, as always on JAX."""
    return None if fused_attention_op_available() else window or None
