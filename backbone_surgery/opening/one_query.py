"""Attention of one query to a cache on a GPU: by products that read it as it lies, or a kernel."""

from typing import Any

from keras import ops

from backbone_surgery import target


def share_out(
    attend: Any, heads: list[Any], kept: Any, mask: Any, ends: Any, of_heads: list[Any]
) -> Any:
    """Attend by a kernel; on a mesh each device to its share of the rows and heads."""
    placement = target.placement()
    if placement is None:
        return attend(heads, kept, mask, ends, of_heads)
    from jax.sharding import PartitionSpec

    divides = kept[0].shape[2] % placement.shares_of_heads == 0
    rows, along = placement.rows_axis(len(mask)), placement.axes_of_heads if divides else None
    of_slots = PartitionSpec(rows, None, along)
    return placement.share_out(
        attend,
        (heads, kept, mask, ends, of_heads),
        (of_slots, of_slots, PartitionSpec(rows), PartitionSpec(), PartitionSpec(along)),
        (PartitionSpec(rows, along), of_slots, of_slots),
    )


def adds_up(time: Any) -> bool:
    """Tell whether to multiply and add up, where there is one query, instead of a product.

    On a GPU. A product there would turn the keys first; this reads them as they lie.
    """
    return isinstance(time, int) and time == 1 and target.platform() == "gpu"


def scores_of_one(query: Any, key: Any) -> Any:
    """Multiply one query, [batch, 1, key heads, groups, size], by all keys.

    Returns float[batch, key heads, groups, 1, keys].
    """
    products = ops.cast(key[:, :, :, None], "float32") * ops.cast(query, "float32")
    scores = ops.cast(ops.sum(products, axis=-1), key.dtype)
    scores = ops.transpose(scores, (0, 2, 3, 1))[:, :, :, None]
    # So that its softmax is one kernel, and is not in this one: of few slots that would be slow.
    return target.apart(target.in_order(scores))


def mix_of_one(shares: Any, value: Any) -> Any:
    """Add up the values by their shares, [batch, key heads, groups, keys].

    Returns float[batch, key heads, groups, size].
    """
    shares = ops.transpose(ops.cast(shares, "float32"), (0, 3, 1, 2))[..., None]
    return ops.cast(
        ops.sum(shares * ops.cast(value, "float32")[:, :, :, None], axis=1), value.dtype
    )
