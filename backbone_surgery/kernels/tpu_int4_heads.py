"""Products with kernels [heads, inputs, head_dim] of four bits, as one kernel for a TPU.

Keras takes the numbers for a matrix [inputs, outputs] as they lie, and packs that: one of its rows
holds the same few inputs of one head, one after the other. So the matrix is a grid of blocks: down
the heads, and across which of these few inputs it is. Groups of rows end within a head.
"""

from functools import partial
from typing import Any, NamedTuple

from backbone_surgery.kernels import tpu, tpu_bits
from backbone_surgery.kernels.packed import Packed

_SIZE = 256
"""Of a head: its bytes are as many as a TPU reads at once."""

_ROWS, _MOST_ROWS = 32, 1024
"""Of bytes, that a TPU keeps together, and of a head at most."""


class _Sizes(NamedTuple):
    """What a program knows of its work.

    Attributes:
        rows: of bytes, of a head.
        group: rows that a scale is for, a power of two.
        groups: that a head has a part of, at most.
        all_groups: how many there are.
    """

    rows: int
    group: int
    groups: int
    all_groups: int


def fits(packed: Packed) -> bool:
    """Tell whether `product` is for a matrix of several heads: how they lie in memory."""
    rows, width = packed.rows_of_head, packed.heads * _SIZE
    return (
        packed.head_dim == _SIZE
        and packed.inputs % packed.heads == rows % _ROWS == 0
        and rows <= _MOST_ROWS
        and packed.rows % packed.group == 0
        and packed.group & (packed.group - 1) == 0
        and width * packed.rows // packed.group <= tpu_bits.MOST_KNOWN
    )


def product(x: Any, packed: Packed) -> Any:
    """Multiply rows by the kernels of all heads.

    Args:
        x: bfloat16[rows, inputs], of which there are a multiple of 8.
        packed: the matrix.

    Returns:
        float32[rows, outputs].
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    heads, group, tokens = packed.heads, packed.group, len(x)
    rows, all_groups = packed.rows_of_head, packed.rows // group
    # They begin at multiples of both, so a head may begin within one.
    is_even = max(rows, group) % min(rows, group) == 0
    groups = max(rows // group, 1) if is_even else (rows + group - 2) // group + 1
    of_groups = pl.BlockSpec((all_groups, _SIZE), lambda head, part: (0, part))
    made = jax.ShapeDtypeStruct((tokens, packed.outputs), "float32")
    (y,) = tpu.call(
        _product_of_heads,
        [
            (
                x.reshape(tokens, rows, heads).transpose(2, 0, 1),
                pl.BlockSpec((None, tokens, rows), lambda head, part: (part, 0, 0)),
            ),
            (packed.numbers, pl.BlockSpec((rows, _SIZE // 2), lambda head, part: (head, part))),
            (packed.scale, of_groups),
            (packed.zero, of_groups),
        ],
        [(made, pl.BlockSpec((tokens, _SIZE), lambda head, part: (0, head)))],
        (packed.outputs // _SIZE, heads),
        scratch=[
            pltpu.VMEM((rows, rows), jnp.bfloat16),
            pltpu.VMEM((_SIZE, _SIZE), jnp.bfloat16),
            *[pltpu.VMEM((heads, all_groups, _SIZE), jnp.float32)] * 2,
        ],
        sizes=_Sizes(rows, group, groups, all_groups),
    )
    return y


def _product_of_heads(
    x_ref: Any,
    bytes_ref: Any,
    scale_ref: Any,
    zero_ref: Any,
    sum_ref: Any,
    pick_ref: Any,
    mix_ref: Any,
    *in_order: Any,
    sizes: _Sizes,
) -> None:
    """Multiply all tokens by some inputs of one head, and add that up."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    head, part = pl.program_id(0), pl.program_id(1)

    @pl.when((head == 0) & (part == 0))
    def _() -> None:
        order = partial(tpu_bits.order_of_rows, rows=sizes.rows)
        pick_ref[:] = tpu_bits.selection(sizes.rows, order)
        mix_ref[:] = tpu_bits.selection(_SIZE, partial(tpu_bits.order_of_pairs, outputs=_SIZE))

    @pl.when(head == 0)
    def _() -> None:
        for ref, ordered in zip((scale_ref, zero_ref), in_order, strict=True):
            ordered[part] = tpu_bits.exactly(ref[:].astype("float32"), mix_ref[:])

    @pl.when(part == 0)
    def _() -> None:
        sum_ref[:] = jnp.zeros(sum_ref.shape, "float32")

    first = head * sizes.rows >> sizes.group.bit_length() - 1
    xs = _by_group(tpu_bits.dot(x_ref[:], pick_ref[:]), head, first, sizes)
    matrix = jnp.concatenate(tpu_bits.numbers(bytes_ref[:]), axis=1)
    found = tpu_bits.dot(jnp.concatenate(xs, axis=0).astype("bfloat16"), matrix)
    for i, x in enumerate(xs):
        row = pl.ds(jnp.minimum(first + i, sizes.all_groups - 1), 1)
        scale, zero = (ref[part, row, :] for ref in in_order)
        less = jnp.sum(x, axis=1, keepdims=True) * (zero + tpu_bits.WORTH)
        sum_ref[:] += (found[i * len(x) : (i + 1) * len(x)] - less) * scale

    @pl.when(part == pl.num_programs(1) - 1)
    def _() -> None:
        sum_ref[:] = tpu_bits.exactly(sum_ref[:], mix_ref[:], (1, 1))


def _by_group(x: Any, head: Any, first: Any, sizes: _Sizes) -> list[Any]:
    """Return the rows for each group of a head, with zeros for the inputs of the others."""
    import jax
    import jax.numpy as jnp

    row = tpu_bits.order_of_rows(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), sizes.rows)
    group = (head * sizes.rows + row >> sizes.group.bit_length() - 1) - first
    return [jnp.where(group == i, x, 0.0) for i in range(sizes.groups)]
