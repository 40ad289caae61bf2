"""Products with weights of four bits on a CPU, as they are packed; see `packed_products`."""

from typing import Any

import numpy as np

from backbone_surgery import target
from backbone_surgery.kernels import calls
from backbone_surgery.kernels.packed import Packed

_MOST_ROWS = 4
"""With more rows XLA's products with what it unpacks take no longer. See docs/performance.md."""

_SCALES, _ZEROS = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")

_MULTIPLES = {"outputs": (8, 32), "inputs": (16, 16), "turned": (32, 1)}
"""What the inputs of a group and the outputs divide by, to fill vectors of any processor."""


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows, of any dtype."""
    of_group, of_outputs = _MULTIPLES[packed.pairs]
    return (
        rows <= _MOST_ROWS
        and packed.heads == 1
        and packed.inputs % packed.group == 0
        and packed.group % of_group == 0
        and packed.outputs % of_outputs == 0
        and _has_known_groups(packed)
        and target.program_of() == "cpu"
        and calls.worth_one(packed.inputs * packed.outputs)
    )


def _has_known_groups(packed: Packed) -> bool:
    if packed.scale is None:
        return True
    scale, zero = (str(x.dtype) for x in (packed.scale, packed.zero))
    return scale in _SCALES and zero in _ZEROS


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

    rows, pairs = len(x), packed.pairs
    size = packed.inputs if packed.scale is None else packed.group
    scale, zero = packed.scale, packed.zero
    if scale is None:
        shape = (packed.outputs, 1) if pairs == "turned" else (1, packed.outputs)
        scale, zero = jnp.ones(shape, "float32"), jnp.zeros(shape, "int8")
    x = x.astype("float32")
    of_x = x.reshape(rows, -1, size).sum(axis=2)
    # The first input of each pair, then the second; else the rows next to each other.
    x = x.reshape(rows, -1, 2).swapaxes(1, 2) if pairs == "turned" else x.T
    made = jax.ShapeDtypeStruct((rows, packed.outputs), "float32")
    name = packed_target(pairs, scale.dtype.name, zero.dtype.name, rows)
    call = jax.ffi.ffi_call(name, [made] if pairs == "turned" else [made, made])
    y, *_ = call(x, of_x, packed.numbers, scale, zero, parts=np.int64(calls.count_parts()))
    return y
