"""What is packed to int4 and shared by the devices of a mesh: each reads its share by itself.

Left to XLA, devices would unpack their shares at each token, and exchange more.
"""

from collections.abc import Callable
from typing import Any

from keras import ops

from backbone_surgery.caching.packed_matrix import product
from backbone_surgery.kernels.packed import Packed
from backbone_surgery.opening.placement import Placement


def share_of(packed: Packed, placement: Placement) -> Packed:
    """Return the matrix that one device has, of the variables of all."""
    axis, shares = placement.axis_of(packed.numbers), placement.shares_of_heads
    if axis is None:
        return packed
    if _adds_up(packed, axis):
        return packed._replace(inputs=packed.inputs // shares)
    return packed._replace(outputs=packed.outputs // shares)


def product_on_mesh(x: Any, packed: Packed, placement: Placement) -> Any:
    """Multiply tokens by a packed matrix, each device by its share.

    Args:
        x: float[batch, time, inputs].
        packed: the matrix, of variables.
        placement: where arrays lie.

    Returns:
        float[batch, time, outputs].
    """
    import jax
    from jax.sharding import PartitionSpec

    along, by_rows = placement.axes_of_heads, placement.rows_axis(x.shape[0])
    axis, share = placement.axis_of(packed.numbers), share_of(packed, placement)
    adds_up, shared = _adds_up(packed, axis), None if axis is None else along

    def run(x: Any, arrays: dict[str, Any]) -> Any:
        made = product(x, share._replace(**arrays))
        return jax.lax.psum(made, along) if adds_up else made

    arrays, of_outputs = packed.tensors(), None if adds_up else shared
    specs = dict.fromkeys(arrays, PartitionSpec(*[None] * (axis or 0), shared))
    if "divisor" in specs:
        specs["divisor"] = PartitionSpec(of_outputs)
    of_x = PartitionSpec(by_rows, None, shared if adds_up else None)
    of_y = PartitionSpec(by_rows, None, of_outputs)
    return placement.share_out(run, (x, arrays), (of_x, specs), of_y)


def _adds_up(packed: Packed, axis: int | None) -> bool:
    """Tell whether devices share the inputs of a matrix, along an axis, and not the outputs."""
    return packed.heads == 1 and axis == (1 if packed.pairs == "turned" else 0)


def look_up_on_mesh(
    look_up: Callable[[Any, Any], Any], tokens: Any, arrays: Any, placement: Placement
) -> Any:
    """Look tokens up in a table whose entries devices share: each looks its own ones up.

    Args:
        look_up: `(tokens, arrays) -> float[batch, time, hidden_dim]`.
        tokens: int[batch, time].
        arrays: of the table, with an axis for the entries first.
        placement: where arrays lie.
    """
    import jax
    from jax.sharding import PartitionSpec

    along, by_rows = placement.axes_of_heads, PartitionSpec(placement.rows_axis(len(tokens)))

    def run(tokens: Any, arrays: Any) -> Any:
        own = jax.tree.leaves(arrays)[0].shape[0]
        at = tokens - jax.lax.axis_index(along) * own
        is_own = (at >= 0) & (at < own)
        found = look_up(ops.where(is_own, at, 0), arrays)
        return jax.lax.psum(ops.where(is_own[..., None], found, 0), along)

    specs = by_rows, jax.tree.map(lambda _: PartitionSpec(along), arrays)
    return placement.share_out(run, (tokens, arrays), specs, by_rows)
