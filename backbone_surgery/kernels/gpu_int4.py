"""Products with weights of four bits as one kernel for a GPU, which reads them as they are packed.

XLA does not take the shifts that unpack them into a product: it writes the whole matrix out first,
at each token. Here a program unpacks a block of it, where it multiplies. Groups of inputs have a
scale and a zero point for each output, which are applied to the sum over a group.
"""

from typing import Any, NamedTuple

import keras

from backbone_surgery.kernels import gpu
from backbone_surgery.kernels.calls import added_up

_OUTPUTS = 128
"""That a program computes."""

_PROGRAMS, _MOST_PARTS = 800, 8
"""Programs that keep a GPU busy, and parts of the inputs."""

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Fewer are filled up; for more, unpacking once costs less than to do so in each program."""

_LEAST_INPUTS, _MOST_INPUTS = 32, 256
"""Of a group: a program multiplies one at a time."""

_STEPS = {"outputs": (1, 2), "inputs": (2, 1), "turned": (2, 1)}
"""How many inputs, and how many outputs, the two numbers of a byte belong to."""

_ONE = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
"""The bits of a number whose last four bits are worth one each, and this number."""


class Packed(NamedTuple):
    """A matrix of four bits as Keras packs it: the first of two is in the low half of a byte.

    Attributes:
        numbers: int8[inputs, outputs / 2] where `pairs` is "outputs"; int8[inputs / 2, outputs]
            where it is "inputs"; int8[outputs, inputs / 2] where it is "turned".
        pairs: which numbers lie in one byte.
        inputs: how many.
        outputs: how many.
        group: how many inputs a scale is for, or are multiplied at a time.
        scale: float[groups, outputs], or, "turned", float[outputs, groups]; `None` for none.
        zero: what zero is, int8 or float, of the same shape as `scale`.
    """

    numbers: Any
    pairs: str
    inputs: int
    outputs: int
    group: int
    scale: Any = None
    zero: Any = None


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows of this dtype."""
    group = packed.group
    return (
        rows <= _MOST_ROWS
        and keras.backend.standardize_dtype(dtype) in _ONE
        and _LEAST_INPUTS <= group <= _MOST_INPUTS
        and group & (group - 1) == 0
        and packed.inputs % group == 0
        and gpu.available()
    )


def product(x: Any, packed: Packed) -> Any:
    """Multiply rows by a packed matrix.

    Args:
        x: float[rows, inputs].
        packed: the matrix.

    Returns:
        float32[rows, outputs].
    """
    import jax
    from jax.experimental import pallas as pl

    rows, groups = len(x), packed.inputs // packed.group
    columns = -(-packed.outputs // _OUTPUTS)
    wanted = gpu.parts_of(columns, _PROGRAMS, min(groups, _MOST_PARTS))
    steps = -(-groups // wanted)
    filled = max(_LEAST_ROWS, 1 << (rows - 1).bit_length()), columns * _OUTPUTS
    inputs, outputs = _STEPS[packed.pairs]
    of_matrix = [(packed.numbers, (packed.inputs // inputs, filled[1] // outputs))]
    if packed.scale is not None:
        of_matrix += [(array, (groups, filled[1])) for array in (packed.scale, packed.zero)]
    if packed.pairs == "turned":
        of_matrix = [(array, shape[::-1]) for array, shape in of_matrix]
    of_x = x.astype("float32").reshape(rows, groups, packed.group).sum(axis=2)
    of_rows = [(x, (filled[0], packed.inputs)), (of_x, (filled[0], groups))]
    parts = -(-groups // steps)
    made = jax.ShapeDtypeStruct((parts, rows, packed.outputs), "float32")
    (sums,) = gpu.call(
        _product_of_packed,
        [
            (array, pl.BlockSpec(shape, lambda n, j: (0, 0)))
            for array, shape in (*of_rows, *of_matrix)
        ],
        [(made, pl.BlockSpec((None, *filled), lambda n, j: (j, 0, 0)))],
        (columns, parts),
        sizes=(rows, packed.outputs),
        steps=steps,
        groups=groups,
        group=packed.group,
        pairs=packed.pairs,
    )
    return added_up(sums)


def _product_of_packed(
    x_ref: Any,
    of_x_ref: Any,
    bytes_ref: Any,
    *refs: Any,
    sizes: tuple[int, int],
    steps: int,
    groups: int,
    group: int,
    pairs: str,
) -> None:
    """Multiply all rows by some groups of inputs of some outputs.

    Where the outputs lie next to each other the matrix is the first factor, turned, since a GPU can
    take that one out of registers. So sums are [outputs, rows] then, and else [rows, outputs].
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    *of_groups, sums_ref = refs
    (count, outputs), (in_step, out_step) = sizes, _STEPS[pairs]
    start, part = pl.program_id(0) * _OUTPUTS, pl.program_id(1)
    row, is_turned = jnp.arange(len(sums_ref)), pairs == "turned"
    inputs, width = jnp.arange(group // in_step) * in_step, _OUTPUTS // out_step
    columns = [start + i + jnp.arange(width) * out_step for i in range(out_step)]

    def across(of_rows: Any, of_outputs: Any) -> tuple[Any, Any]:
        if is_turned:
            return of_rows[:, None], of_outputs[None]
        return of_rows[None], of_outputs[:, None]

    def read(ref: Any, at: tuple[Any, Any], is_there: Any) -> Any:
        return gpu.load(ref.at[at[::-1] if is_turned else at], is_there)

    def add(i: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        g = part * steps + i
        mask = None
        if outputs % _OUTPUTS:
            mask = jnp.broadcast_to((columns[0] < outputs)[None], (len(inputs), width))
            mask = mask.T if is_turned else mask
        here = pl.ds(g * len(inputs), len(inputs)), pl.ds(start // out_step, width)
        numbers = _numbers(read(bytes_ref, here, mask), x_ref.dtype)
        own = [(g * group + i + inputs)[None] for i in range(in_step)]
        xs = [gpu.load(x_ref.at[row[:, None], at], (row < count)[:, None]) for at in own]
        of_x = gpu.load(of_x_ref.at[row, jnp.full_like(row, g)], row < count)
        new = []
        for j, (total, column) in enumerate(zip(totals, columns, strict=True)):
            pairs = [(x, numbers[j * in_step + i].T) for i, x in enumerate(xs)]
            found = sum(gpu.dot(x, y) if is_turned else gpu.dot(y, x.T) for x, y in pairs)
            scale, zero = 1.0, jnp.full((width,), _ONE[x_ref.dtype.name][1] + 8.0)
            if of_groups:
                at = jnp.full((width,), g), column
                scale, offset = (
                    read(ref, at, column < outputs).astype("float32") for ref in of_groups
                )
                zero += offset
                scale = across(row, scale)[1]
            sums, zero = across(of_x, zero)
            new.append(total + (found - sums * zero) * scale)
        return tuple(new)

    shape = (len(row), width) if is_turned else (width, len(row))
    totals = tuple(jnp.zeros(shape, "float32") for _ in columns)
    totals = jax.lax.fori_loop(0, jnp.minimum(steps, groups - part * steps), add, totals)
    for column, total in zip(columns, totals, strict=True):
        at = across(row, column)
        gpu.store(sums_ref.at[at], total, (at[0] < count) & (at[1] < outputs))


def _numbers(pairs: Any, dtype: Any) -> list[Any]:
    """Return the first and the second number of each byte, as floats that are too large by some.

    The four bits of a number, of which the first is turned over, become the last of a float whose
    other bits are given. So they make a number from 0 to 15, 8 more than they stood for, on top of
    `_ONE`.
    """
    import jax
    import jax.numpy as jnp

    wide, (bits, _) = pairs.astype("int16"), _ONE[dtype.name]
    shifted = [jax.lax.shift_right_logical(wide, jnp.int16(n)) for n in (0, 4)]
    numbers = [(x & jnp.int16(15)) ^ jnp.int16(8) | jnp.int16(bits) for x in shifted]
    return [jax.lax.bitcast_convert_type(x, dtype) for x in numbers]
