"""Numbers of four bits inside a kernel for a TPU, and what puts rows and columns in order.

Words of 32 bits hold the bytes of four rows, and shifts make two numbers of bfloat16 of them at
once. These are in another order than the rows were. The matrix unit puts the rest in that order:
products with a matrix of zeros and ones, which lose nothing.
"""

from collections.abc import Callable
from typing import Any

MOST_KNOWN = 2**19
"""Groups times outputs whose scales and zeros a program has room for, on the chip."""

WORTH = 128 + 8
"""By how much the numbers that `numbers` makes are too large."""

_BITS = 0x43004300
"""Of two numbers of bfloat16 whose last four bits are worth one each: 128 and these bits."""


def numbers(pairs: Any) -> tuple[Any, Any]:
    """Return the first and the second number of each byte, int8[rows, n], and `WORTH` more.

    The rows are then in the order of `order_of_rows`.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    words = pltpu.bitcast(pairs, jnp.int32) ^ jnp.int32(-0x77777778)  # the first bits of all

    def shifted(bits: int) -> Any:
        found = jax.lax.shift_right_logical(words, jnp.int32(bits)) & jnp.int32(0x000F000F)
        return pltpu.bitcast(found | jnp.int32(_BITS), jnp.bfloat16)

    low, high = (jnp.concatenate([shifted(n), shifted(n + 8)], axis=0) for n in (0, 4))
    return low, high


def order_of_rows(i: Any, rows: int) -> Any:
    """Return which of some rows becomes number i: words hold bytes of four, two are taken each."""
    import jax.numpy as jnp

    is_second = i >= rows // 2
    at = jnp.where(is_second, i - rows // 2, i)
    return (at >> 1) * 4 + (at & 1) * 2 + is_second


def order_of_pairs(i: Any, outputs: int) -> Any:
    """Return which of some outputs becomes number i: first the first ones of the bytes of a row."""
    half = outputs // 2
    return 2 * (i & (half - 1)) + (i >= half)


def selection(size: int, order: Callable[[Any], Any]) -> Any:
    """Return bfloat16[size, size]: a product with it has in column i what was in `order(i)`."""
    import jax
    import jax.numpy as jnp

    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return (row == order(column)).astype("bfloat16")


def exactly(x: Any, selected: Any, axes: tuple[int, int] = (1, 0)) -> Any:
    """Multiply float32 by zeros and ones, to 16 bits: as two numbers of bfloat16."""
    first = x.astype("bfloat16")
    rest = (x - first.astype("float32")).astype("bfloat16")
    return dot(first, selected, axes) + dot(rest, selected, axes)


def dot(x: Any, y: Any, axes: tuple[int, int] = (1, 0)) -> Any:
    """Multiply two matrices of bfloat16 to float32, adding up over an axis of each.

    Whatever `precision` a model has, that is for float32 alone.
    """
    from jax import lax

    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(
        x, y, numbers, precision=lax.Precision.DEFAULT, preferred_element_type="float32"
    )
