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


class _Sizes(NamedTuple):
    """What a program knows of its work.

    Attributes:
        rows: of all.
        outputs: of the matrix.
        pairs: see `Packed`.
        group: inputs that are multiplied at a time.
        groups: how many there are.
        steps: groups of a part.
    """

    rows: int
    outputs: int
    pairs: str
    group: int
    groups: int
    steps: int

    @property
    def is_turned(self) -> bool:
        """Whether the inputs of an output lie next to each other."""
        return self.pairs == "turned"

    def order(self, of_inputs: Any, of_outputs: Any) -> tuple[Any, Any]:
        """Return sizes or indices in the order of the axes of the matrix."""
        return (of_outputs, of_inputs) if self.is_turned else (of_inputs, of_outputs)

    def across(self, of_rows: Any, of_outputs: Any) -> tuple[Any, Any]:
        """Have what is known of rows and of outputs spread over sums.

        Where the outputs lie next to each other the matrix is the first factor, turned, since a GPU
        can take that one out of registers. So sums are [outputs, rows] then, else [rows, outputs].
        """
        if self.is_turned:
            return of_rows[:, None], of_outputs[None]
        return of_rows[None], of_outputs[:, None]


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
    sizes = _Sizes(rows, packed.outputs, packed.pairs, packed.group, groups, steps)
    filled = max(_LEAST_ROWS, 1 << (rows - 1).bit_length()), columns * _OUTPUTS
    inputs, outputs = _STEPS[packed.pairs]
    of_x = x.astype("float32").reshape(rows, groups, packed.group).sum(axis=2)
    operands = [
        (x, (filled[0], packed.inputs)),
        (of_x, (filled[0], groups)),
        (packed.numbers, sizes.order(packed.inputs // inputs, filled[1] // outputs)),
    ]
    if packed.scale is not None:
        of_groups = sizes.order(groups, filled[1])
        operands += [(packed.scale, of_groups), (packed.zero, of_groups)]
    parts = -(-groups // steps)
    made = jax.ShapeDtypeStruct((parts, rows, packed.outputs), "float32")
    (sums,) = gpu.call(
        _product_of_packed,
        [(array, pl.BlockSpec(shape, lambda n, j: (0, 0))) for array, shape in operands],
        [(made, pl.BlockSpec((None, *filled), lambda n, j: (j, 0, 0)))],
        (columns, parts),
        sizes=sizes,
    )
    return added_up(sums)


def _product_of_packed(
    x_ref: Any, of_x_ref: Any, bytes_ref: Any, *refs: Any, sizes: _Sizes
) -> None:
    """Multiply all rows by some groups of inputs of some outputs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    *of_groups, sums_ref = refs
    in_step, out_step = _STEPS[sizes.pairs]
    start, first = pl.program_id(0) * _OUTPUTS, pl.program_id(1) * sizes.steps
    row, width = jnp.arange(len(sums_ref)), _OUTPUTS // out_step
    inputs = jnp.arange(sizes.group // in_step) * in_step
    columns = [start + i + jnp.arange(width) * out_step for i in range(out_step)]
    mask = None
    if sizes.outputs % _OUTPUTS:
        there = sizes.order(jnp.full_like(inputs, True, bool), columns[0] < sizes.outputs)
        mask = there[0][:, None] & there[1][None]

    def add(i: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        g = first + i
        here = pl.ds(g * len(inputs), len(inputs)), pl.ds(start // out_step, width)
        numbers = _numbers(gpu.load(bytes_ref.at[sizes.order(*here)], mask), x_ref.dtype)
        own = [(g * sizes.group + i + inputs)[None] for i in range(in_step)]
        xs = [gpu.load(x_ref.at[row[:, None], at], (row < sizes.rows)[:, None]) for at in own]
        of_x = gpu.load(of_x_ref.at[row, jnp.full_like(row, g)], row < sizes.rows)
        new = []
        for j, (total, column) in enumerate(zip(totals, columns, strict=True)):
            factors = [(x, numbers[j * in_step + i].T) for i, x in enumerate(xs)]
            found = sum(gpu.dot(x, y) if sizes.is_turned else gpu.dot(y, x.T) for x, y in factors)
            scale, zero = _of_group(of_groups, g, column, sizes)
            sum_of_x, zero = sizes.across(of_x, zero + (_ONE[x_ref.dtype.name][1] + 8.0))
            new.append(total + (found - sum_of_x * zero) * sizes.across(row, scale)[1])
        return tuple(new)

    shape = (len(row), width) if sizes.is_turned else (width, len(row))
    totals = tuple(jnp.zeros(shape, "float32") for _ in columns)
    totals = jax.lax.fori_loop(0, jnp.minimum(sizes.steps, sizes.groups - first), add, totals)
    for column, total in zip(columns, totals, strict=True):
        at = sizes.across(row, column)
        gpu.store(sums_ref.at[at], total, (at[0] < sizes.rows) & (at[1] < sizes.outputs))


def _of_group(refs: list[Any], g: Any, column: Any, sizes: _Sizes) -> tuple[Any, Any]:
    """Return the scale and the zero point of a group for some outputs, float32[outputs] each."""
    import jax.numpy as jnp

    if not refs:
        return jnp.ones(column.shape, "float32"), jnp.zeros(column.shape, "float32")
    at = sizes.order(jnp.full_like(column, g), column)
    scale, zero = (gpu.load(ref.at[at], column < sizes.outputs).astype("float32") for ref in refs)
    return scale, zero


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
