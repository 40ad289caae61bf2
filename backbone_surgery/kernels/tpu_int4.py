"""Products with weights of four bits as one kernel for a TPU, which reads them as they are packed.

XLA unpacks the whole matrix first, at each token. Here a program takes words of 32 bits, of the
bytes of four rows, and shifts make two numbers of bfloat16 of them at once. What they make is in
another order than the rows and columns were. The matrix unit puts the rest in that order: products
with a matrix of zeros and ones, which lose nothing.
"""

from typing import Any, NamedTuple

import keras

from backbone_surgery.kernels import tpu
from backbone_surgery.kernels.packed import Packed

_OUTPUTS, _PIECE = 1024, 256
"""That a program computes, and how many of them at a time."""

_INPUTS = 1024
"""That a program reads at most."""

_CHUNKS = {"outputs": 128, "inputs": 128, "turned": 256}
"""How many inputs are multiplied at a time."""

_ROWS, _MOST_ROWS = 8, 64
"""What a matrix has a multiple of, to be put below another; and for more, unpacking costs less."""

_LEAST_GROUP = 32

_BITS, _WORTH = 0x43004300, 128
"""The bits of two numbers of bfloat16 whose last four bits are worth one each, and each number."""


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows of this dtype."""
    chunk = _CHUNKS[packed.pairs]
    return (
        rows <= _MOST_ROWS
        and keras.backend.standardize_dtype(dtype) == "bfloat16"
        and packed.inputs % chunk == 0
        and packed.outputs >= _PIECE
        and packed.heads == 1
        and (packed.scale is None or _fits(packed.group, chunk))
        and tpu.available()
    )


def _fits(group: int, chunk: int) -> bool:
    """Tell whether a chunk has whole groups, not too small ones, or is a part of one."""
    return group >= _LEAST_GROUP and max(group, chunk) % min(group, chunk) == 0


class _Sizes(NamedTuple):
    """What a program knows of its work.

    Attributes:
        pairs: see `Packed`.
        outputs: of the matrix.
        group: inputs that a scale is for.
        chunk: inputs that are multiplied at a time.
        chunks: that a program reads.
        pieces: of outputs that a program computes.
    """

    pairs: str
    outputs: int
    group: int
    chunk: int
    chunks: int
    pieces: int

    @property
    def groups(self) -> int:
        """How many a chunk has."""
        return max(self.chunk // self.group, 1)


def product(x: Any, packed: Packed) -> Any:
    """Multiply rows by a packed matrix.

    Args:
        x: bfloat16[rows, inputs].
        packed: the matrix.

    Returns:
        float32[rows, outputs].
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, is_turned = len(x), packed.pairs == "turned"
    chunk = _CHUNKS[packed.pairs]
    of_all = packed.inputs // chunk
    chunks = next(n for n in range(_INPUTS // chunk, 0, -1) if of_all % n == 0)
    pieces = min(_OUTPUTS, packed.outputs) // _PIECE
    width, read = pieces * _PIECE, chunks * chunk
    group = packed.inputs if packed.scale is None else packed.group
    sizes = _Sizes(packed.pairs, packed.outputs, group, chunk, chunks, pieces)
    filled = rows if sizes.groups == 1 else -(-rows // _ROWS) * _ROWS
    shapes = {
        "outputs": (read, width // 2),
        "inputs": (read // 2, width),
        "turned": (width, read // 2),
    }

    x = jnp.pad(x, ((0, filled - rows), (0, 0)))
    operands = [
        (x, pl.BlockSpec((filled, read), lambda n, k: (0, k))),
        (
            packed.numbers,
            pl.BlockSpec(shapes[packed.pairs], lambda n, k: (n, k) if is_turned else (k, n)),
        ),
    ]
    scratch = [pltpu.VMEM(s, jnp.bfloat16) for s in ((chunk, chunk), (_PIECE, _PIECE))]
    if packed.scale is not None:
        of_groups = packed.inputs // group, width
        # A table's lie so already: a TPU has the longer axis last.
        known = (y.T if is_turned else y for y in (packed.scale, packed.zero))
        operands += [(y, pl.BlockSpec(of_groups, lambda n, k: (0, n))) for y in known]
        scratch += [pltpu.VMEM(of_groups, jnp.float32)] * 2
    made = jax.ShapeDtypeStruct((filled, packed.outputs), "float32")
    (y,) = tpu.call(
        _product_of_packed,
        operands,
        [(made, pl.BlockSpec((filled, width), lambda n, k: (0, n)))],
        (-(-packed.outputs // width), of_all // chunks),
        scratch=scratch,
        sizes=sizes,
    )
    return y[:rows]


def _product_of_packed(x_ref: Any, bytes_ref: Any, *refs: Any, sizes: _Sizes) -> None:
    """Multiply all rows by some inputs of some outputs, and add that up."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    of_groups, refs = (refs[:2], refs[2:]) if len(refs) > 3 else ((), refs)
    sum_ref, pick_ref, mix_ref, *in_order = refs
    program, step, rows = pl.program_id(0), pl.program_id(1), len(x_ref)

    @pl.when(step == 0)
    def _() -> None:
        pick_ref[:] = _selection(sizes.chunk, _order_of_inputs, sizes)
        mix_ref[:] = _selection(_PIECE, _order_of_outputs, sizes)
        sum_ref[:] = jnp.zeros(sum_ref.shape, "float32")
        for ref, ordered in zip(of_groups, in_order, strict=True):
            _put_in_order(ref, ordered, program, mix_ref[:], sizes)

    for i in range(sizes.chunks):
        x = _dot(x_ref[:, i * sizes.chunk : (i + 1) * sizes.chunk], pick_ref[:])
        xs = _by_group(x, sizes)
        of_x = jnp.sum(xs, axis=1, keepdims=True)
        first = jax.lax.div((step * sizes.chunks + i) * sizes.chunk, sizes.group)
        for j in range(sizes.pieces):
            piece = slice(j * _PIECE, (j + 1) * _PIECE)
            found = _times(xs.astype("bfloat16"), bytes_ref, i, j, sizes)
            for g in range(sizes.groups):
                own = slice(g * rows, (g + 1) * rows)
                less, scale = _WORTH + 8.0, 1.0
                if in_order:
                    scale, zero = (ref[pl.ds(first + g, 1), piece] for ref in in_order)
                    less = zero + less
                sum_ref[:, piece] += (found[own] - of_x[own] * less) * scale

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        for j in range(sizes.pieces):
            piece = slice(j * _PIECE, (j + 1) * _PIECE)
            sum_ref[:, piece] = _exactly(sum_ref[:, piece], mix_ref[:], (1, 1))


def _times(xs: Any, bytes_ref: Any, chunk: int, piece: int, sizes: _Sizes) -> Any:
    """Multiply rows of the numbers of a chunk by those of a piece, in the order of their bits."""
    import jax.numpy as jnp

    inputs, outputs = sizes.chunk // 2, _PIECE
    if sizes.pairs == "outputs":
        inputs, outputs = sizes.chunk, _PIECE // 2
    of_inputs = slice(chunk * inputs, (chunk + 1) * inputs)
    of_outputs = slice(piece * outputs, (piece + 1) * outputs)
    if sizes.pairs == "turned":
        matrix = jnp.concatenate(_numbers(bytes_ref[of_outputs, of_inputs]), axis=1)
        return _dot(xs, matrix, (1, 1))
    axis = 1 if sizes.pairs == "outputs" else 0
    return _dot(xs, jnp.concatenate(_numbers(bytes_ref[of_inputs, of_outputs]), axis=axis))


def _numbers(pairs: Any) -> tuple[Any, Any]:
    """Return the first and the second number of each byte, int8[rows, n], 8 and `_WORTH` more.

    The rows are then in the order of `_order_of_rows`.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    words = pltpu.bitcast(pairs, jnp.int32) ^ jnp.int32(-0x77777778)  # the first bits of all

    def shifted(bits: int) -> Any:
        numbers = jax.lax.shift_right_logical(words, jnp.int32(bits)) & jnp.int32(0x000F000F)
        return pltpu.bitcast(numbers | jnp.int32(_BITS), jnp.bfloat16)

    low, high = (jnp.concatenate([shifted(n), shifted(n + 8)], axis=0) for n in (0, 4))
    return low, high


def _order_of_rows(i: Any, rows: int) -> Any:
    """Return which of some rows becomes number i: words hold bytes of four, two are taken each."""
    half = rows // 2
    return ((i & (half - 1)) >> 1) * 4 + (i & 1) * 2 + (i >= half)


def _order_of_inputs(i: Any, sizes: _Sizes) -> Any:
    half = sizes.chunk // 2
    if sizes.pairs == "outputs":
        return _order_of_rows(i, sizes.chunk)
    at = i & (half - 1)
    return 2 * (_order_of_rows(at, half) if sizes.pairs == "inputs" else at) + (i >= half)


def _order_of_outputs(i: Any, sizes: _Sizes) -> Any:
    half = _PIECE // 2
    if sizes.pairs == "turned":
        return _order_of_rows(i, _PIECE)
    return 2 * (i & (half - 1)) + (i >= half) if sizes.pairs == "outputs" else i


def _selection(size: int, order: Any, sizes: _Sizes) -> Any:
    """Return bfloat16[size, size]: a product with it has in column i what was in `order(i)`."""
    import jax
    import jax.numpy as jnp

    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return (row == order(column, sizes)).astype("bfloat16")


def _by_group(x: Any, sizes: _Sizes) -> Any:
    """Repeat rows for each group of a chunk, with zeros for the inputs of the others."""
    import jax
    import jax.numpy as jnp

    if sizes.groups == 1:
        return x
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    group = _order_of_inputs(column, sizes) >> (sizes.group.bit_length() - 1)  # a power of two
    return jnp.concatenate([jnp.where(group == g, x, 0.0) for g in range(sizes.groups)], axis=0)


def _put_in_order(ref: Any, ordered_ref: Any, program: Any, mix: Any, sizes: _Sizes) -> None:
    """Write what is known of groups, for all outputs of a program, in the order of their bits."""
    import jax
    import jax.numpy as jnp

    for j in range(sizes.pieces):
        piece = slice(j * _PIECE, (j + 1) * _PIECE)
        x = ref[:, piece].astype("float32")
        start = (program * sizes.pieces + j) * _PIECE
        is_there = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < sizes.outputs
        ordered_ref[:, piece] = _exactly(jnp.where(is_there, x, 0.0), mix, (1, 0))


def _exactly(x: Any, selection: Any, axes: tuple[int, int]) -> Any:
    """Multiply float32 by zeros and ones, to 16 bits: as two numbers of bfloat16."""
    first = x.astype("bfloat16")
    rest = (x - first.astype("float32")).astype("bfloat16")
    return _dot(first, selection, axes) + _dot(rest, selection, axes)


def _dot(x: Any, y: Any, axes: tuple[int, int] = (1, 0)) -> Any:
    """Multiply two matrices of bfloat16 to float32, adding up over an axis of each."""
    import jax

    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type="float32")
