"""What is known of a layer that Keras quantised to int4."""

from typing import Any

import keras
from keras import ops

from backbone_surgery import graph


def policy_of(layer: keras.Layer) -> Any:
    """Return the dtype policy of a layer; the layers of a loaded preset share a map of them all."""
    policy = layer.dtype_policy
    is_for_all = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return policy[layer.path] if is_for_all else policy


def kernel_shape(layer: keras.Layer) -> tuple[int, ...]:
    """Return the shape of the kernel of a `Dense` or an `EinsumDense`, before it was packed."""
    stored = tuple(graph.stored_kernel(layer).shape)
    if layer.quantization_mode != "int4":
        return stored
    if isinstance(layer, keras.layers.Dense):
        return (stored[0], layer.units)
    return tuple(layer.original_kernel_shape)


def widened_rows(table: Any, numbers: Any, scale: Any, zero: Any = None) -> Any:
    """Return rows of a table quantised to int4 as floats, float[..., output_dim].

    Args:
        table: the embedding.
        numbers: int8[..., bytes], of which each holds two numbers.
        scale: float[...], that of each row; where there is `zero` float[..., groups].
        zero: what zero is in each group.
    """
    numbers = keras.quantizers.unpack_int4(numbers, table.output_dim, axis=-1)
    numbers = ops.cast(numbers, table.compute_dtype)
    if zero is None:
        return numbers / scale[..., None]
    group = policy_of(table).block_size
    zero = ops.cast(zero, scale.dtype)
    zero, scale = (ops.repeat(x, group, axis=-1)[..., : table.output_dim] for x in (zero, scale))
    return (numbers - zero) * scale
