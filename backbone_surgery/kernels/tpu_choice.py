"""Which experts any token uses, and by how much each token weighs them, by one kernel for a TPU.

Small sums and comparisons, each of which XLA makes a kernel of. Here they are products with
matrices of zeros and ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from backbone_surgery.kernels import tpu


class Used(NamedTuple):
    """The experts that any token weighs.

    Attributes:
        order: int32[turns]: which they are. After these the last one again.
        count: int32[1]: how many there are.
        shares: float32[turns, tokens]: what each weighs for a token. For a token whose weights are
            NaN all of them are NaN; it uses no expert.
    """

    order: Any
    count: Any
    shares: Any


def used_experts(
    given: Any,
    weigh: Callable[[Any], Any],
    turns: int,
    tokens: int,
    own: int,
    first: Any,
) -> Used:
    """Find the experts that any token weighs.

    Args:
        given: float[tokens, experts].
        weigh: what makes weights of it, in float32, out of what a kernel for a TPU can compute.
        turns: how many there are at most.
        tokens: how many tokens, the first ones, are of use. The others weigh none.
        own: of how many experts, one after the other, these are found.
        first: int32[]: which of all is the first of those; it is number 0 in `order`.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0, 0))

    def made(dtype: str, *shape: int) -> tuple[Any, Any]:
        return jax.ShapeDtypeStruct(shape, dtype), whole(*shape)

    order, count, shares = tpu.call(
        _used_experts,
        [(given, whole(*given.shape))],
        [made("int32", 1, turns), made("int32", 1, 1), made("float32", turns, len(given))],
        (1,),
        known=[jnp.reshape(first, 1).astype("int32")],
        weigh=weigh,
        tokens=tokens,
        own=own,
    )
    return Used(order[0], count[0], shares)


def _used_experts(
    first_ref: Any,
    given_ref: Any,
    order_ref: Any,
    count_ref: Any,
    shares_ref: Any,
    *,
    weigh: Callable[[Any], Any],
    tokens: int,
    own: int,
) -> None:
    import jax.numpy as jnp
    from jax import lax

    def numbers(shape: tuple[int, int], axis: int) -> Any:
        return lax.broadcasted_iota("int32", shape, axis)

    def product(x: Any, y: Any) -> Any:
        """Multiply whole float32, [n, experts] by [m, experts]."""
        axes = (((1,), (1,)), ((), ()))
        exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        return lax.dot_general(x.astype("float32"), y.astype("float32"), axes, **exact)

    weights = weigh(given_ref[...].astype("float32"))
    rows, experts = weights.shape
    turns = shares_ref.shape[0]
    place = numbers((rows, experts), 1) - first_ref[0]
    is_of_use = numbers((rows, experts), 0) < tokens
    is_lost = (weights != weights) & is_of_use
    weights = jnp.where(is_of_use & ~is_lost & (place >= 0) & (place < own), weights, 0.0)
    is_used = jnp.max((weights != 0).astype("float32"), axis=0, keepdims=True)
    up_to = numbers((experts, experts), 0) >= numbers((experts, experts), 1)
    rank = product(is_used, up_to)
    count = jnp.max(rank, axis=1, keepdims=True)
    turn = (numbers((turns, experts), 0) + 1).astype("float32")
    is_there = (rank == jnp.minimum(turn, count)) & (is_used > 0)
    number = (numbers((1, experts), 1) - first_ref[0]).astype("float32")
    order_ref[...] = product(number, is_there).astype("int32")
    count_ref[...] = count.astype("int32")
    lost = product(jnp.ones((turns, experts), "float32"), is_lost)
    shares = product(is_there & (turn <= count), weights)
    shares_ref[...] = jnp.where(lost > 0, jnp.nan, shares)
