"""Products with weights of four bits on a CPU, as they are packed; see `packed_products`."""

import math
from typing import Any

import numpy as np

from backbone_surgery import target
from backbone_surgery.kernels import calls
from backbone_surgery.kernels.packed import Packed

_MOST_ROWS = 4
"""With more rows XLA's products with what it unpacks take as long. See docs/performance.md."""

_SCALES, _ZEROS = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")

_MULTIPLES = {"outputs": (8, 32), "inputs": (16, 16), "turned": (32, 1)}
"""What the inputs of a group and the outputs divide by, to fill vectors of any processor."""

_OF_HEAD = 128
"""What the outputs of a head divide by: the numbers in a line of the cache."""


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows, of any dtype."""
    of_group, of_outputs = _MULTIPLES[packed.pairs]
    return (
        rows <= _MOST_ROWS
        and _at_a_time(packed) % of_group == 0
        and packed.outputs % of_outputs == 0
        and (packed.heads == 1 or _has_known_heads(packed))
        and _has_known_groups(packed)
        and target.program_of() == "cpu"
        and calls.worth_one(packed.inputs * packed.outputs)
    )


def _at_a_time(packed: Packed) -> int:
    """Return how many inputs are multiplied before their sum is scaled: of one group and head."""
    inputs = packed.inputs // packed.heads
    return inputs if packed.scale is None else math.gcd(packed.group, inputs)


def _has_known_heads(packed: Packed) -> bool:
    is_even = packed.head_dim % _OF_HEAD == packed.inputs % packed.heads == 0
    return is_even and packed.pairs == "outputs" and packed.scale is not None


def _has_known_groups(packed: Packed) -> bool:
    if packed.scale is None:
        return True
    scale, zero = (str(x.dtype) for x in (packed.scale, packed.zero))
    return packed.inputs % packed.group == 0 and scale in _SCALES and zero in _ZEROS


def product(x: Any, packed: Packed) -> Any:
    """Multiply rows by a packed matrix.

    Args:
        x: float[rows, inputs].
        packed: the matrix.

    Returns:
        float32[rows, outputs].
    """
    import jax
    import jax.numpy as jnp

    from backbone_surgery.kernels.targets import packed_target

    rows, pairs, heads = len(x), packed.pairs, packed.heads
    scale, zero = packed.scale, packed.zero
    if scale is None:
        shape = (packed.outputs, 1) if pairs == "turned" else (1, packed.outputs)
        scale, zero = jnp.ones(shape, "float32"), jnp.zeros(shape, "int8")
    # A row of a matrix with heads is multiplied by other inputs after each `head_dim` outputs.
    x = x.astype("float32").reshape(rows, -1, heads)
    of_x = x.reshape(rows, -1, _at_a_time(packed), heads).sum(axis=2).transpose(2, 0, 1)
    arrays = of_x, packed.numbers, scale, zero
    name = packed_target(pairs, scale.dtype.name, zero.dtype.name, rows)
    parts = np.int64(calls.count_parts())
    if pairs == "turned":  # the first input of each pair, then the second
        x = x.reshape(rows, -1, 2).swapaxes(1, 2)
        made = jax.ShapeDtypeStruct((rows, packed.outputs), "float32")
        return jax.ffi.ffi_call(name, made)(x, *arrays, parts=parts)
    matrices = packed.outputs // packed.head_dim
    sums = jax.ShapeDtypeStruct((rows, packed.columns), "float32")
    made = jax.ShapeDtypeStruct((matrices, *sums.shape), "float32")
    y, _ = jax.ffi.ffi_call(name, [made, sums])(x.transpose(2, 1, 0), *arrays, parts=parts)
    if heads == 1:
        return y[0]
    y = calls.added_up(y.reshape(matrices, rows, heads, -1).transpose(2, 1, 0, 3))
    return y.reshape(rows, packed.outputs)
