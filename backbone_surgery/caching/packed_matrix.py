"""The matrix of a layer quantised to int4, and products with it, one way or another."""

import math
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.caching.projection import (
    SPLIT,
    axes_of,
    form_of,
    is_quantised,
    works_by_token,
)
from backbone_surgery.kernels import cpu_int4, gpu_int4, tpu_int4
from backbone_surgery.kernels.packed import Packed
from backbone_surgery.opening.int4 import policy_of

_WITHOUT_GROUPS = 128
"""Inputs that are multiplied at a time where there is one scale for all."""


def is_packed(layer: Any) -> bool:
    """Tell whether a layer can be run by a `PackedProjection`: its kernel is packed as a matrix."""
    if not is_quantised(layer, "int4"):
        return False
    if type(layer) is keras.layers.Dense:
        return True
    x, kernel, y = axes_of(layer)
    return works_by_token(layer) and (kernel == x[2:] + y[2:] or _has_heads_first(layer))


def _has_heads_first(layer: Any) -> bool:
    """Tell whether the kernel of a layer is [heads, inputs, head_dim], as Gemma has it."""
    return type(layer) is keras.layers.EinsumDense and form_of(layer.equation) == SPLIT


def matrix_of(layer: Any) -> Packed | None:
    """Return the matrix of a layer, of variables; `None` where there is none that is packed so.

    That of a head may be for inputs that its quantizer has rounded.
    """
    is_head = type(layer) is keras.layers.ReversibleEmbedding
    if not is_packed(layer) and not (is_head and layer.quantization_mode == "int4"):
        return None
    if layer.lora_enabled or (layer.inputs_quantizer and not is_head):
        return None
    if not is_head:
        numbers, name, pairs = graph.stored_kernel(layer), "kernel", "outputs"
        inputs, outputs = numbers.shape[0], getattr(layer, "units", 0)
        if not outputs:
            outputs = math.prod(layer.original_kernel_shape) // inputs
    else:
        inputs, outputs = layer.output_dim, layer.input_dim
        numbers, name, pairs = graph.stored_embeddings(layer), "embeddings", "turned"
        if not layer.tie_weights:
            numbers, name, pairs = layer.reverse_embeddings, "reverse_embeddings", "inputs"
    heads = layer.original_kernel_shape[0] if _has_heads_first(layer) else 1
    scale, zero = getattr(layer, f"{name}_scale"), getattr(layer, f"{name}_zero", None)
    if heads > 1 and (zero is None or outputs % 2):
        return None  # without groups a scale is then not for an output
    if zero is None:
        group = min(_WITHOUT_GROUPS, inputs)
        return Packed(numbers, pairs, inputs, outputs, group, divisor=scale)
    group = min(policy_of(layer).block_size, inputs)
    return Packed(numbers, pairs, inputs, outputs, group, scale, zero, heads)


def takes(rows: int, packed: Packed, dtype: Any) -> bool:
    """Tell whether a kernel of the program that is being made reads a matrix as it is packed."""
    return _kernels().takes(rows, packed, dtype)


def _kernels() -> Any:
    of_platform = {"cpu": cpu_int4, "gpu": gpu_int4, "tpu": tpu_int4}
    return of_platform[target.program_of() or "cpu"]


def product(x: Any, packed: Packed) -> Any:
    """Multiply tokens by a packed matrix: by a kernel that reads it so, or unpacked first.

    Args:
        x: float[batch, time, inputs].
        packed: the matrix, of tensors.

    Returns:
        float[batch, time, outputs].
    """
    batch, time, inputs = x.shape
    rows, dtype = ops.reshape(x, (batch * time, inputs)), x.dtype
    is_taken = takes(batch * time, packed, dtype)
    y = _kernels().product(rows, packed) if is_taken else _product_unpacked(rows, packed)
    y = y if packed.divisor is None else y / packed.divisor
    return ops.reshape(ops.cast(y, dtype), (batch, time, packed.outputs))


def _product_unpacked(x: Any, packed: Packed) -> Any:
    """Multiply rows by a matrix that is unpacked first, as Keras does."""
    axis, along = (0 if packed.pairs == "inputs" else 1), (1 if packed.pairs == "turned" else 0)
    size = packed.inputs if packed.pairs != "outputs" else packed.columns
    numbers = ops.cast(keras.quantizers.unpack_int4(packed.numbers, size, axis), x.dtype)
    if packed.scale is not None:
        repeated = (ops.repeat(y, packed.group, axis=along) for y in (packed.zero, packed.scale))
        whole = tuple(slice(size) for size in numbers.shape)
        zero, scale = (ops.cast(y[whole], x.dtype) for y in repeated)
        numbers = (numbers - zero) * scale
    if packed.heads == 1:
        return ops.matmul(x, ops.transpose(numbers) if packed.pairs == "turned" else numbers)
    numbers = ops.reshape(numbers, (-1, packed.inputs, packed.head_dim))
    return ops.reshape(ops.einsum("ri,hid->rhd", x, numbers), (len(x), packed.outputs))
