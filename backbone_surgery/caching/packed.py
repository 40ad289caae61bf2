"""Layers quantised to int4, whose weights are read as they are packed."""

import math
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.caching.projection import (
    SPLIT,
    axes_of,
    finished,
    form_of,
    is_quantised,
    works_by_token,
)
from backbone_surgery.caching.stand_in import StandIn
from backbone_surgery.kernels import gpu_int4, tpu_int4
from backbone_surgery.kernels.packed import Packed

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


class PackedProjection(StandIn):
    """Compute what a layer quantised to int4 computes, which stays the owner of the weights.

    XLA unpacks the kernel to memory first, at each token. What is not a program of a GPU or a TPU,
    or has many tokens, calls the layer itself.

    Args:
        layer: the layer, built. Once it has LoRA, or is quantised in another way, it is called.

    Call arguments:
        inputs: float[batch, time, ...].
    """

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Project the inputs; `training` is what the layer takes too, and changes nothing."""
        y = _product(self.layer, inputs)
        if y is None:
            return self.layer(inputs)
        shape = self.compute_output_spec(inputs).shape[2:]
        return finished(self.layer, ops.reshape(y, (*y.shape[:2], *shape)))


def is_packed_table(layer: Any) -> bool:
    """Tell whether tokens can be looked up in a layer by a `PackedEmbedding`."""
    is_table = type(layer) in (keras.layers.Embedding, keras.layers.ReversibleEmbedding)
    return is_table and layer.quantization_mode == "int4"


class PackedEmbedding(StandIn):
    """Look tokens up in a table quantised to int4, whose layer stays the owner of the weights.

    Keras unpacks the whole table first. Here what was looked up is unpacked.

    Args:
        layer: the layer, built. Once it has LoRA, or is quantised in another way, it is called.

    Call arguments:
        inputs: int[batch, time].
    """

    def call(self, inputs: Any) -> Any:
        """Return float[batch, time, hidden_dim]."""
        table = self.layer
        if not is_packed_table(table) or table.lora_enabled:
            return table(inputs)
        tokens = ops.cast(inputs, "int32")
        taken = ops.take(graph.stored_embeddings(table), tokens, axis=0)
        numbers = keras.quantizers.unpack_int4(taken, table.output_dim, axis=-1)
        numbers = ops.cast(numbers, self.compute_dtype)
        scale, zero = table.embeddings_scale, getattr(table, "embeddings_zero", None)
        scale = ops.take(scale, tokens, axis=0)
        if zero is None:
            return numbers / scale[..., None]
        zero = ops.cast(ops.take(zero, tokens, axis=0), scale.dtype)
        group = table.dtype_policy.block_size
        zero, scale = (
            ops.repeat(x, group, axis=-1)[..., : table.output_dim] for x in (zero, scale)
        )
        return (numbers - zero) * scale

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return which tokens are some, where the layer masks zeros."""
        return self.layer.compute_mask(inputs, mask)


def logits_of(head: Any, states: Any) -> Any:
    """Return the logits of hidden states, by a table that may be quantised to int4.

    Args:
        head: the layer that holds the table.
        states: float[batch, time, hidden_dim].
    """
    logits = _product(head, states)
    if logits is None:
        return head(states, reverse=True)
    cap = head.logit_soft_cap
    return logits if cap is None else ops.tanh(logits / cap) * cap


def reads_packed(layer: Any, rows: int) -> bool:
    """Tell whether the program that is being made reads the matrix of a layer as it is packed.

    Args:
        layer: any.
        rows: of the program, each with one token.
    """
    packed, _ = _packed(layer)
    return packed is not None and _kernels().takes(rows, packed, layer.compute_dtype)


def _kernels() -> Any:
    return tpu_int4 if target.program_of() == "tpu" else gpu_int4


def _product(layer: Any, x: Any) -> Any | None:
    """Multiply tokens by the matrix of a layer, if it can be read as it is packed.

    Args:
        layer: any.
        x: float[batch, time, ...].

    Returns:
        float[batch, time, outputs], or `None`.
    """
    batch, time = x.shape[:2]
    is_sized = isinstance(batch, int) and isinstance(time, int)
    if not is_sized or not reads_packed(layer, batch * time):
        return None
    packed: Any
    packed, divisor = _packed(layer)
    if math.prod(x.shape[2:]) != packed.inputs:  # a `Dense` takes arrays of any rank
        return None
    stored = {name: getattr(packed, name) for name in ("numbers", "scale", "zero")}
    tensors = {k: ops.convert_to_tensor(v) for k, v in stored.items() if v is not None}
    packed = packed._replace(**tensors)
    x = ops.reshape(ops.cast(x, layer.compute_dtype), (batch * time, packed.inputs))
    y = _kernels().product(x, packed)
    y = y if divisor is None else y / ops.convert_to_tensor(divisor)
    return ops.reshape(ops.cast(y, layer.compute_dtype), (batch, time, packed.outputs))


def _packed(layer: Any) -> tuple[Packed | None, Any]:
    """Return the matrix of a layer, of variables; `None` where there is none that is packed so.

    And what its outputs are divided by, if it has no groups.
    """
    is_head = type(layer) is keras.layers.ReversibleEmbedding
    if not is_packed(layer) and not (is_head and layer.quantization_mode == "int4"):
        return None, None
    if layer.inputs_quantizer or layer.lora_enabled:
        return None, None
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
    if zero is None and heads > 1:
        return None, None  # a scale is then not for an output
    if zero is None:
        group = min(_WITHOUT_GROUPS, inputs)
        return Packed(numbers, pairs, inputs, outputs, group), scale
    group = min(layer.dtype_policy.block_size, inputs)
    return Packed(numbers, pairs, inputs, outputs, group, scale, zero, heads), None
