"""Products with weights of four bits as one kernel for a GPU, which reads them as they are packed.

XLA does not take the shifts that unpack them into a product: it writes the whole matrix out first,
at each token. Here a program unpacks a block of it, where it multiplies. Groups of inputs have a
scale and a zero point for each output, which are applied to the sum over a group.
"""

import math
from typing import Any, NamedTuple

import keras

from backbone_surgery.kernels import gpu
from backbone_surgery.kernels.calls import added_up
from backbone_surgery.kernels.packed import Packed

_OUTPUTS = 128
"""That a program computes; of few rows it computes twice as many."""

_OF_WARP = 32
"""Outputs that 32 threads compute."""

_WARPS = 132 * 16
"""Of 32 threads, which an H100 runs at once of these programs: more would wait for the others."""

_FEW_PARTS, _MOST_PARTS = 8, 32
"""Of the inputs. There are more than few only while their sums, written and read in float32, are
at most half as many bytes as the matrix."""

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Fewer are filled up; for more, unpacking once costs less than to do so in each program."""

_LEAST_INPUTS, _MOST_INPUTS = 32, 256
"""Of a group: a program multiplies one at a time, or a part of one."""

_LEAST_AT_A_TIME = 16
"""Inputs that a GPU multiplies matrices by."""

_STEPS = {"outputs": (1, 2), "inputs": (2, 1), "turned": (2, 1)}
"""How many inputs, and how many outputs, the two numbers of a byte belong to."""

_STAGES = {"outputs": 1, "inputs": 1, "turned": 3}
"""Of reading. Bytes that wait in shared memory would be taken out of it one by one, and not as
pairs, unless the inputs of an output lie next to each other."""

_FEW_ROWS = 16
"""Of up to so many the matrix may be the first factor."""

_ONE = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
"""The bits of a number whose last four bits are worth one each, and this number."""

_HALVES = """{{
.reg .b32 n;
shr.u32 n, $2, {shift};
lop3.b32 n, n, 0x0F0F0F0F, 0x08080808, 0x6A;
prmt.b32 $0, n, {byte}, 0x4140;
prmt.b32 $1, n, {byte}, 0x4342;
}}"""
"""Makes the numbers of one half of four bytes: their bits, of which the first is turned over, with
the first byte of `_ONE` before each."""


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows of this dtype."""
    group, heads = packed.group, packed.heads
    return (
        0 < rows <= _MOST_ROWS
        and keras.backend.standardize_dtype(dtype) in _ONE
        and _LEAST_INPUTS <= group <= _MOST_INPUTS
        and group & (group - 1) == 0
        and packed.inputs % group == 0
        and (heads == 1 or _has_whole_heads(packed))
        and _at_a_time(packed) >= _LEAST_AT_A_TIME
        and gpu.available()
    )


def _width(rows: int, packed: Packed) -> int:
    """Return how many outputs a program computes."""
    is_wide = packed.pairs == "outputs" and packed.heads == 1 and rows <= _FEW_ROWS
    return 2 * _OUTPUTS if is_wide else _OUTPUTS


def _has_whole_heads(packed: Packed) -> bool:
    is_even = packed.inputs % packed.heads == packed.head_dim % _OUTPUTS == 0
    return is_even and packed.rows % packed.group == 0


def _at_a_time(packed: Packed) -> int:
    """Return how many inputs a program multiplies at a time: of one group, and of one head."""
    return math.gcd(packed.group, packed.inputs // packed.heads)


class _Sizes(NamedTuple):
    """What a program knows of its work.

    Attributes:
        rows: of all.
        outputs: of the matrix.
        pairs: see `Packed`.
        size: inputs that are multiplied at a time.
        times: how often that is done.
        steps: how often in a part.
        group: inputs that a scale is for.
        heads: see `Packed`.
        head_dim: see `Packed`.
        columns: see `Packed`.
        width: outputs that a program computes.
    """

    rows: int
    outputs: int
    pairs: str
    size: int
    times: int
    steps: int
    group: int
    heads: int
    head_dim: int
    columns: int
    width: int

    @property
    def is_turned(self) -> bool:
        """Whether the inputs of an output lie next to each other."""
        return self.pairs == "turned"

    @property
    def has_rows_first(self) -> bool:
        """Whether the rows are the first factor.

        Else the turned matrix is: of few rows, where its outputs lie next to each other. A GPU can
        take the first factor out of registers.
        """
        return self.is_turned or self.rows > _FEW_ROWS

    def place(self, step: Any, block: Any) -> tuple[Any, Any, Any]:
        """Return which inputs a step is for as they are packed, which outputs, and the group.

        All are counted in blocks. Of several heads a row holds some inputs of one, those outputs of
        each that are its own.
        """
        if self.heads == 1:
            return step, block, step
        rows, blocks = self.times // self.heads, self.head_dim // self.width
        row = block // blocks * rows + step % rows
        return row, step // rows * blocks + block % blocks, row * self.size // self.group

    def order(self, of_inputs: Any, of_outputs: Any) -> tuple[Any, Any]:
        """Return sizes or indices in the order of the axes of the matrix."""
        return (of_outputs, of_inputs) if self.is_turned else (of_inputs, of_outputs)

    def across(self, of_rows: Any, of_outputs: Any) -> tuple[Any, Any]:
        """Have what is known of rows and of outputs spread over sums.

        These are [rows, outputs], or [outputs, rows] where the matrix is the first factor.
        """
        if self.has_rows_first:
            return of_rows[:, None], of_outputs[None]
        return of_rows[None], of_outputs[:, None]


def _sizes_of(rows: int, packed: Packed) -> _Sizes:
    """Share out a product among programs."""
    size, width = _at_a_time(packed), _width(rows, packed)
    times, columns = packed.inputs // size, -(-packed.outputs // width)
    most = min(max(packed.inputs // (32 * rows), _FEW_PARTS), _MOST_PARTS, times)
    parts = max(min(_WARPS * _OF_WARP // width // columns, most), 1)
    of_matrix = packed.group, packed.heads, packed.head_dim, packed.columns
    of_all = rows, packed.outputs, packed.pairs, size, times, -(-times // parts)
    return _Sizes(*of_all, *of_matrix, width)


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

    sizes = _sizes_of(len(x), packed)
    rows, times, width = sizes.rows, sizes.times, sizes.width
    columns, parts = -(-packed.outputs // width), -(-times // sizes.steps)
    filled = max(_LEAST_ROWS, 1 << (rows - 1).bit_length()), columns * width
    # In the order in which steps take them, first those of the first numbers of bytes.
    x = x.reshape(rows, -1, packed.heads).swapaxes(1, 2)
    x = x.reshape(rows, times, -1, _STEPS[packed.pairs][0]).swapaxes(2, 3)
    operands = [(x.reshape(rows, -1), (filled[0], packed.inputs))]
    operands += [(_added_up_rounded(x), (filled[0], times)), *_of_matrix(packed, sizes)]
    made = jax.ShapeDtypeStruct((parts, rows, packed.outputs), "float32")
    (sums,) = gpu.call(
        _product_of_packed,
        [(array, pl.BlockSpec(shape, lambda n, j: (0, 0))) for array, shape in operands],
        [(made, pl.BlockSpec((None, *filled), lambda n, j: (j, 0, 0)))],
        (columns, parts),
        warps=width // _OF_WARP,
        stages=_STAGES[packed.pairs],
        sizes=sizes,
    )
    return added_up(sums)


def _added_up_rounded(x: Any) -> Any:
    """Add up the inputs that a product takes at a time.

    XLA would add up what they were before they were rounded, unless it is told to round: it takes
    two conversions, there and back, for none. A sum counts 136 times in bfloat16, see `_numbers`,
    so products within a model were wrong by a third.

    Args:
        x: float[rows, times, 1 or 2, n], of n bytes.

    Returns:
        float32[rows, times].
    """
    import jax

    # The exponents of float32: with fewer, numbers near zero would be zero.
    kept = jax.numpy.finfo("float32").nexp, jax.numpy.finfo(x.dtype).nmant
    return jax.lax.reduce_precision(x.astype("float32"), *kept).sum(axis=(2, 3))


def _of_matrix(packed: Packed, sizes: _Sizes) -> list[tuple[Any, tuple[int, int]]]:
    """Return the arrays of a matrix, and which sizes a program is to take them for."""
    rows = packed.inputs if packed.heads == 1 else packed.rows
    columns = -(-sizes.columns // sizes.width) * sizes.width
    inputs, outputs = _STEPS[packed.pairs]
    operands = [(packed.numbers, sizes.order(rows // inputs, columns // outputs))]
    if packed.scale is not None:
        of_groups = sizes.order(rows // packed.group, columns)
        operands += [(packed.scale, of_groups), (packed.zero, of_groups)]
    return operands


def _product_of_packed(
    x_ref: Any, of_x_ref: Any, bytes_ref: Any, *refs: Any, sizes: _Sizes
) -> None:
    """Multiply all rows by some groups of inputs of some outputs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    *of_groups, sums_ref = refs
    in_step, out_step = _STEPS[sizes.pairs]
    block, first = pl.program_id(0), pl.program_id(1) * sizes.steps
    row, width = jnp.arange(len(sums_ref)), sizes.width // out_step
    inputs = jnp.arange(sizes.size // in_step)
    columns = [i + jnp.arange(width) * out_step for i in range(out_step)]
    mask = _mask(inputs, block * sizes.width + columns[0], sizes)

    def add(i: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        step = first + i
        place, lies, group = sizes.place(step, block)
        here = pl.ds(place * len(inputs), len(inputs)), pl.ds(lies * width, width)
        numbers = _numbers(gpu.load(bytes_ref.at[sizes.order(*here)], mask), x_ref.dtype)
        own = [(step * sizes.size + i * len(inputs) + inputs)[None] for i in range(in_step)]
        xs = [gpu.load(x_ref.at[row[:, None], at], (row < sizes.rows)[:, None]) for at in own]
        of_x = gpu.load(of_x_ref.at[row, jnp.full_like(row, step)], row < sizes.rows)
        # A product waits, so what is needed after it is read before it.
        kept = [_of_group(of_groups, group, lies * sizes.width + i, sizes) for i in columns]
        new = []
        for j, (total, (scale, zero)) in enumerate(zip(totals, kept, strict=True)):
            own_numbers = numbers[j * in_step : (j + 1) * in_step]
            found = sum(_dot(x, y, sizes) for x, y in zip(xs, own_numbers, strict=True))
            sum_of_x, zero = sizes.across(of_x, zero + (_ONE[x_ref.dtype.name][1] + 8.0))
            new.append(total + (found - sum_of_x * zero) * sizes.across(row, scale)[1])
        return tuple(new)

    zeros = jnp.zeros((len(row), width) if sizes.has_rows_first else (width, len(row)), "float32")
    totals = (zeros,) * out_step
    totals = jax.lax.fori_loop(0, jnp.minimum(sizes.steps, sizes.times - first), add, totals)
    for column, total in zip(columns, totals, strict=True):
        at = sizes.across(row, block * sizes.width + column)
        gpu.store(sums_ref.at[at], total, (at[0] < sizes.rows) & (at[1] < sizes.outputs))


def _mask(inputs: Any, column: Any, sizes: _Sizes) -> Any:
    """Tell which bytes of a block are of outputs that there are; `None` for all."""
    import jax.numpy as jnp

    if not sizes.outputs % sizes.width:
        return None
    there = sizes.order(jnp.full_like(inputs, True, bool), column < sizes.outputs)
    return there[0][:, None] & there[1][None]


def _dot(x: Any, y: Any, sizes: _Sizes) -> Any:
    """Multiply rows by a block of the matrix, which lies as it is packed."""
    if sizes.is_turned:
        return gpu.dot(x, y.T)
    return gpu.dot(x, y) if sizes.has_rows_first else gpu.dot(y.T, x.T)


def _of_group(refs: list[Any], g: Any, column: Any, sizes: _Sizes) -> tuple[Any, Any]:
    """Return the scale and the zero point of a group for some outputs, float32[outputs] each."""
    import jax.numpy as jnp

    if not refs:
        return jnp.ones(column.shape, "float32"), jnp.zeros(column.shape, "float32")
    at = sizes.order(jnp.full_like(column, g), column)
    scale, zero = (gpu.load(ref.at[at], column < sizes.columns).astype("float32") for ref in refs)
    return scale, zero


def _numbers(pairs: Any, dtype: Any) -> list[Any]:
    """Return the first and the second number of int8[a, b], as floats[a, b] too large by some.

    The four bits of a number, of which the first is turned over, become the last of a float whose
    other bits are given. So they make a number from 0 to 15, 8 more than they stood for, on top of
    `_ONE`. A GPU does that for two numbers at once, the interpreter of kernels for each.
    """
    import jax
    import jax.numpy as jnp

    bits, _ = _ONE[dtype.name]
    if not gpu.is_interpreted():
        byte = f"0x{(bits >> 8) * 0x01010101:08X}"
        codes = [_HALVES.format(shift=n, byte=byte) for n in (0, 4)]
        return [gpu.assembly(code, pairs, dtype, 4) for code in codes]
    wide = pairs.astype("int16")
    shifted = [jax.lax.shift_right_logical(wide, jnp.int16(n)) for n in (0, 4)]
    numbers = [(x & jnp.int16(15)) ^ jnp.int16(8) | jnp.int16(bits) for x in shifted]
    return [jax.lax.bitcast_convert_type(x, dtype) for x in numbers]
