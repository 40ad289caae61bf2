"""Products with weights of four bits as one kernel for a TPU, which reads them as they are packed.

XLA unpacks the whole matrix first, at each token. Here a program unpacks the block of it that it
multiplies by, in the order that `tpu_bits` makes, and puts what it makes in order at the end.
"""

from functools import partial
from typing import Any, NamedTuple

import keras

from backbone_surgery.kernels import tpu, tpu_bits, tpu_int4_heads
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


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether `product` is for so many rows of this dtype."""
    chunk = _CHUNKS[packed.pairs]
    return (
        rows <= _MOST_ROWS
        and keras.backend.standardize_dtype(dtype) == "bfloat16"
        and (packed.scale is None or _fits(packed, chunk))
        and (packed.heads == 1 or tpu_int4_heads.fits(packed))
        and (packed.heads > 1 or packed.inputs % chunk == 0)
        and packed.outputs >= _PIECE
        and tpu.available()
    )


def _fits(packed: Packed, chunk: int) -> bool:
    """Tell whether groups are whole, not too small, and a chunk has some or a part of one."""
    group = packed.group
    is_even = max(group, chunk) % min(group, chunk) == packed.inputs % group == 0
    return group >= _LEAST_GROUP and is_even


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

    rows, sizes = len(x), _sizes(packed)
    if sizes.groups > 1 or packed.heads > 1:
        x = jnp.pad(x, ((0, -rows % _ROWS), (0, 0)))
    if packed.heads > 1:
        return tpu_int4_heads.product(x, packed)[:rows]
    operands, scratch = _operands(x, packed, sizes)
    width = sizes.pieces * _PIECE
    made = jax.ShapeDtypeStruct((len(x), packed.outputs), "float32")
    (y,) = tpu.call(
        _product_of_packed,
        operands,
        [(made, pl.BlockSpec((len(x), width), lambda n, k: (0, n)))],
        (-(-packed.outputs // width), packed.inputs // (sizes.chunks * sizes.chunk)),
        scratch=scratch,
        shared=0,
        sizes=sizes,
    )
    return y[:rows]


def _sizes(packed: Packed) -> _Sizes:
    chunk = _CHUNKS[packed.pairs]
    of_all = packed.inputs // chunk
    chunks = next((n for n in range(_INPUTS // chunk, 1, -1) if of_all % n == 0), 1)
    group = packed.inputs if packed.scale is None else packed.group
    most = max(tpu_bits.MOST_KNOWN // (packed.inputs // group), _PIECE)
    pieces = min(_OUTPUTS, most, packed.outputs) // _PIECE
    return _Sizes(packed.pairs, packed.outputs, group, chunk, chunks, pieces)


def _operands(x: Any, packed: Packed, sizes: _Sizes) -> tuple[list[Any], list[Any]]:
    """Return what is read, with how it is cut into blocks, and scratch."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    width, read = sizes.pieces * _PIECE, sizes.chunks * sizes.chunk
    is_turned = sizes.pairs == "turned"
    shape = {
        "outputs": (read, width // 2),
        "inputs": (read // 2, width),
        "turned": (width, read // 2),
    }[sizes.pairs]
    operands = [
        (x, pl.BlockSpec((len(x), read), lambda n, k: (0, k))),
        (packed.numbers, pl.BlockSpec(shape, lambda n, k: (n, k) if is_turned else (k, n))),
    ]
    scratch = [pltpu.VMEM((size, size), jnp.bfloat16) for size in (sizes.chunk, _PIECE)]
    if packed.scale is not None:
        of_groups = packed.inputs // sizes.group, width
        # A table's lie so already: a TPU has the longer axis last.
        known = (y.T if is_turned else y for y in (packed.scale, packed.zero))
        operands += [(y, pl.BlockSpec(of_groups, lambda n, k: (0, n))) for y in known]
        scratch += [pltpu.VMEM(of_groups, jnp.float32)] * 2
    return operands, scratch


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
        pick_ref[:] = tpu_bits.selection(sizes.chunk, partial(_order_of_inputs, sizes=sizes))
        mix_ref[:] = tpu_bits.selection(_PIECE, partial(_order_of_outputs, sizes=sizes))
        sum_ref[:] = jnp.zeros(sum_ref.shape, "float32")
        for ref, ordered in zip(of_groups, in_order, strict=True):
            _put_in_order(ref, ordered, program, mix_ref[:], sizes)

    for i in range(sizes.chunks):
        x = tpu_bits.dot(x_ref[:, i * sizes.chunk : (i + 1) * sizes.chunk], pick_ref[:])
        xs = _by_group(x, sizes)
        of_x = jnp.sum(xs, axis=1, keepdims=True)
        first = jax.lax.div((step * sizes.chunks + i) * sizes.chunk, sizes.group)
        for j in range(sizes.pieces):
            piece = slice(j * _PIECE, (j + 1) * _PIECE)
            found = _times(xs.astype("bfloat16"), bytes_ref, i, j, sizes)
            for g in range(sizes.groups):
                own = slice(g * rows, (g + 1) * rows)
                less, scale = float(tpu_bits.WORTH), 1.0
                if in_order:
                    scale, zero = (ref[pl.ds(first + g, 1), piece] for ref in in_order)
                    less = zero + less
                sum_ref[:, piece] += (found[own] - of_x[own] * less) * scale

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        for j in range(sizes.pieces):
            piece = slice(j * _PIECE, (j + 1) * _PIECE)
            sum_ref[:, piece] = tpu_bits.exactly(sum_ref[:, piece], mix_ref[:], (1, 1))


def _times(xs: Any, bytes_ref: Any, chunk: int, piece: int, sizes: _Sizes) -> Any:
    """Multiply rows of the numbers of a chunk by those of a piece, in the order of their bits."""
    import jax.numpy as jnp

    inputs, outputs = sizes.chunk // 2, _PIECE
    if sizes.pairs == "outputs":
        inputs, outputs = sizes.chunk, _PIECE // 2
    of_inputs = slice(chunk * inputs, (chunk + 1) * inputs)
    of_outputs = slice(piece * outputs, (piece + 1) * outputs)
    if sizes.pairs == "turned":
        matrix = jnp.concatenate(tpu_bits.numbers(bytes_ref[of_outputs, of_inputs]), axis=1)
        return tpu_bits.dot(xs, matrix, (1, 1))
    axis = 1 if sizes.pairs == "outputs" else 0
    return tpu_bits.dot(
        xs, jnp.concatenate(tpu_bits.numbers(bytes_ref[of_inputs, of_outputs]), axis=axis)
    )


def _order_of_inputs(i: Any, sizes: _Sizes) -> Any:
    half = sizes.chunk // 2
    if sizes.pairs == "outputs":
        return tpu_bits.order_of_rows(i, sizes.chunk)
    at = i & (half - 1)
    return 2 * (tpu_bits.order_of_rows(at, half) if sizes.pairs == "inputs" else at) + (i >= half)


def _order_of_outputs(i: Any, sizes: _Sizes) -> Any:
    if sizes.pairs == "inputs":
        return i
    order = tpu_bits.order_of_rows if sizes.pairs == "turned" else tpu_bits.order_of_pairs
    return order(i, _PIECE)


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
        ordered_ref[:, piece] = tpu_bits.exactly(jnp.where(is_there, x, 0.0), mix)
