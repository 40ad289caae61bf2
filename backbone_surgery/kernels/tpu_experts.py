"""Products with the experts that are used, as one kernel for a TPU, which reads no others.

XLA gathers several kernels of experts in loops, and runs a loop over experts as several kernels a
turn. Here the chip knows before it begins which experts they are, and while it multiplies by one
block of them it reads the next.
"""

from typing import Any

import keras
import numpy as np

from backbone_surgery import target
from backbone_surgery.kernels import tpu

_DTYPES = ("bfloat16", "float32")

_LANES, _ROWS = 128, 16
"""Numbers of the last axis, and of the one before it, that a TPU keeps together."""

_BLOCK_BYTES = 4 * 2**20
"""Of an expert, that are read at once; more, where these are not `_LANES` outputs."""

_MOST_BYTES = 14 * 2**20
"""On the chip at once, of the 16 MiB that a kernel may have there."""


def takes(tokens: int, bank: Any, dtype: str) -> bool:
    """Tell whether the kernel multiplies so many tokens of a dtype by experts of that size."""
    stored = keras.backend.standardize_dtype(bank.dtype)
    if not {stored, dtype} <= set(_DTYPES):
        return False
    _, inputs, outputs = bank.shape
    width, wide = (np.dtype(name).itemsize for name in (dtype, stored))
    size, rows = _block(inputs, outputs, wide), -(-tokens // _ROWS) * _ROWS
    twice = inputs * size * wide + rows * (inputs + size) * width
    cast = inputs * size * width if stored != dtype else 0
    return 2 * twice + cast + rows * size * 4 <= _MOST_BYTES


def product_of_used(x: Any, bank: Any, order: Any, used: Any) -> Any:
    """Multiply tokens by the kernel of each expert that is used.

    Args:
        x: float[turns or 1, tokens, inputs]: for each of these experts, or the same for all.
        bank: float[experts, inputs, outputs].
        order: int32[turns], the experts that are used, and after these any.
        used: int32[1], how many are.

    Returns:
        float[turns, tokens, outputs], zeros for experts that are not used.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    each, tokens, inputs = x.shape
    outputs, turns = bank.shape[2], len(order)
    size = _block(inputs, outputs, np.dtype(bank.dtype).itemsize)
    steps = -(-outputs // size)
    lies_turned = target.order_of_kernel(bank.shape[1:]) == (1, 0)

    def block(turn: Any, step: Any, order: Any, used: Any) -> tuple[Any, Any, Any]:
        """Return what is read: after the last block of the last expert no other."""
        last = jnp.maximum(used[0] - 1, 0)
        expert, step = order[jnp.minimum(turn, last)], jnp.where(turn > last, steps - 1, step)
        return (expert, step, 0) if lies_turned else (expert, 0, step)

    shape = (None, size, inputs) if lies_turned else (None, inputs, size)
    made = jax.ShapeDtypeStruct((turns, tokens, outputs), x.dtype)
    (products,) = tpu.call(
        _product_of_used,
        [
            (x, pl.BlockSpec((None, tokens, inputs), lambda i, *_: (i if each > 1 else 0, 0, 0))),
            (bank.swapaxes(1, 2) if lies_turned else bank, pl.BlockSpec(shape, block)),
        ],
        [(made, pl.BlockSpec((None, tokens, size), lambda i, n, *_: (i, 0, n)))],
        (turns, steps),
        known=[order, used],
        shared=1,
        lies_turned=lies_turned,
    )
    return products


def _block(inputs: int, outputs: int, width: int) -> int:
    """Return how many outputs of an expert to read at once: about as many each time."""
    most = max(_BLOCK_BYTES // (inputs * width * _LANES), 1)
    pieces = -(-outputs // _LANES)
    return min(-(-pieces // -(-pieces // most)) * _LANES, outputs)


def _product_of_used(
    order_ref: Any, used_ref: Any, x_ref: Any, bank_ref: Any, made_ref: Any, *, lies_turned: bool
) -> None:
    """Multiply the tokens by a block of one expert, if it is used."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl

    is_used = pl.program_id(0) < used_ref[0]
    # Mosaic knows the default and whole float32 alone.
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    is_exact = x_ref.dtype == "float32" and asked not in (None, "default")

    @pl.when(is_used)
    def _() -> None:
        made_ref[...] = lax.dot_general(
            x_ref[...],
            bank_ref[...].astype(x_ref.dtype),
            (((1,), (1 if lies_turned else 0,)), ((), ())),
            precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        ).astype(made_ref.dtype)

    @pl.when(~is_used)
    def _() -> None:
        made_ref[...] = jnp.zeros_like(made_ref)
