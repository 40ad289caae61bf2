"""What decoder blocks with a mixture of experts share."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from backbone_surgery.opening.experts import (
    EXPERT_WEIGHTS,
    ROUTER,
    BalancedLoad,
    Expert,
    MixedExperts,
    TopExperts,
)
from backbone_surgery.opening.site import Site


def mixture(
    x: Any,
    logits: Any,
    padding_mask: Any,
    *,
    bank: keras.layers.Layer,
    expert: Expert,
    shared: Mapping[str, int | None],
    whole: Mapping[str, bool] | None = None,
    top_k: int,
    policy: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    **choice: Any,
) -> Any:
    """Spell out a mixture of experts from its router logits on.

    Args:
        x: float[batch, time, hidden_dim], what the experts are given.
        logits: float[batch, time, experts], what the router gives.
        padding_mask: int[batch, time].
        bank: the layer that owns the kernels of the experts.
        expert: what each expert computes with them.
        shared: along which axis devices can share each weight, see `MixedExperts`.
        whole: the other weights of the bank, see there.
        top_k: how many experts are chosen for a token.
        policy: dtype policy of the block.
        loss: that of `BalancedLoad`, where the block adds one in training.
        **choice: other settings of `TopExperts`.

    Returns:
        float[batch, time, hidden_dim].
    """
    logits = Site(ROUTER)(logits)
    if loss is not None:
        logits = BalancedLoad(loss, dtype=policy, name="balanced_load")(logits, padding_mask)
    weights = TopExperts(top_k, dtype=policy, name="top_experts", **choice)(logits)
    weights = Site(EXPERT_WEIGHTS)(weights)
    mixed = MixedExperts(bank, expert, shared, whole, dtype=policy, name="mixed_experts")
    return mixed(x, weights)


def gated(activation: Callable[[Any], Any], upcast: bool = False) -> Callable[[Any, Any], Any]:
    """Return `(gate, x) -> activation(gate) * x`, with the activation in float32 if `upcast`."""

    def product(gate: Any, x: Any) -> Any:
        gate = activation(ops.cast(gate, "float32") if upcast else gate)
        return ops.cast(gate, x.dtype) * x

    return product


def halves(x: Any) -> tuple[Any, Any]:
    """Return the first and the second half of the last axis.

    Devices that share what is made of a half have its part of both, as they would not by `split`.
    """
    x = ops.reshape(x, (*ops.shape(x)[:-1], 2, x.shape[-1] // 2))
    return x[..., 0, :], x[..., 1, :]


def refuse_router_logits(block: Any) -> str | None:
    """Say why a block that gives router logits beside hidden states cannot be opened."""
    if block.output_router_logits:
        return (
            "a block that gives hidden states alone. Received one with "
            "`output_router_logits=True`. Make the backbone without it, and capture the site "
            "'blocks.*.router'"
        )
    return None
