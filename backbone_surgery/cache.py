"""The key/value cache: one `{"key", "value"}` pair of arrays for each attention of a graph."""

import math
from typing import Any

import keras
from keras import ops, tree

from backbone_surgery.attention import pack
from backbone_surgery.errors import SurgeryError


def new_cache(
    backbone_with_cache: keras.Model, batch_size: int, length: int
) -> list[dict[str, Any]]:
    """Make an empty cache for a rewired backbone.

    Args:
        backbone_with_cache: what `rewire` returned.
        batch_size: number of rows.
        length: number of slots, the most tokens that a row can ever have, padding included.

    Returns:
        For each attention of the graph, in order, `{"key", "value"}`: zeros of the dtype that the
        graph computes in, float[batch_size, length, num_key_value_heads, head_dim]; then, for
        each `Condition`, `{"found"}`: bool[batch_size, length]. Under a
        `keras.distribution` they are laid out by the layout map's entry for `cache_<i>_key` or
        `cache_<i>_value`, else like data.

    Raises:
        SurgeryError: the model has no cache inputs, or a size is not positive.
    """
    for name, size in (("batch_size", batch_size), ("length", length)):
        if not isinstance(size, int) or size < 1:
            raise SurgeryError(
                f"new_cache: expected `{name}` to be a positive int. Received {size!r}. Pass the "
                "number of rows and of slots."
            )
    return tree.map_structure(
        lambda t: _zeros(t, batch_size, length), cache_inputs(backbone_with_cache)
    )


def new_packed_cache(backbone_with_cache: keras.Model, batch_size: int, length: int) -> Any:
    """Make an empty cache as a loop carries it, array by array; see `attention.pack`."""
    return tree.map_structure(
        lambda t: pack(_zeros(t, batch_size, length)), cache_inputs(backbone_with_cache)
    )


def unpack(cache: Any, backbone_with_cache: keras.Model, batch_size: int) -> Any:
    """Give the arrays of a packed cache their dimensions back."""
    return tree.map_structure(
        lambda x, t: ops.reshape(x, (batch_size, -1, *t.shape[2:])),
        cache,
        cache_inputs(backbone_with_cache),
    )


def slot_axis(batch_size: int) -> int:
    """Return which dimension of a packed array counts the slots."""
    return 0 if batch_size == 1 else 1


def cache_inputs(backbone_with_cache: keras.Model) -> list[dict[str, keras.KerasTensor]]:
    """Return the symbolic cache inputs of a rewired backbone."""
    inputs = getattr(backbone_with_cache, "input", None)
    if not isinstance(inputs, dict) or "cache" not in inputs:
        raise SurgeryError(
            "new_cache: expected a backbone_with_cache. Received "
            f"{getattr(backbone_with_cache, 'name', backbone_with_cache)!r}, which has no cache "
            "inputs. Call `backbone_surgery.rewire` first."
        )
    return inputs["cache"]


def bytes_per_token(backbone_with_cache: keras.Model) -> int:
    """Return how many bytes of cache one token of one row takes."""
    tensors = tree.flatten(cache_inputs(backbone_with_cache))
    return sum(math.prod(t.shape[2:]) * _itemsize(t.dtype) for t in tensors)


def _itemsize(dtype: str) -> int:
    return ops.convert_to_numpy(ops.zeros((), dtype)).dtype.itemsize


def _zeros(tensor: keras.KerasTensor, batch_size: int, length: int) -> Any:
    shape = (batch_size, length, *tensor.shape[2:])
    zeros = ops.zeros(shape, tensor.dtype)
    distribution = keras.distribution.distribution()
    if distribution is None:
        return zeros
    layout = distribution.get_tensor_layout(tensor.name) or distribution.get_data_layout(shape)
    return keras.distribution.distribute_tensor(zeros, layout)
