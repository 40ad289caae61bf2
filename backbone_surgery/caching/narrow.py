"""`NarrowProjection`: a layer quantised to int8, whose kernel a GPU reads as it lies."""

from typing import Any

import keras
from keras import ops

from backbone_surgery import target
from backbone_surgery.caching.projection import (
    axes_of,
    finished,
    is_quantised,
    product,
    works_by_token,
)
from backbone_surgery.caching.stand_in import StandIn


def is_narrow(layer: Any) -> bool:
    """Tell whether a layer can be run by a `NarrowProjection`: it scales each token by itself."""
    if not is_quantised(layer, "int8"):
        return False
    if type(layer) is keras.layers.Dense:
        return True
    x, kernel, y = axes_of(layer)
    return works_by_token(layer) and set(x[2:]) <= set(kernel) - set(y)


class NarrowProjection(StandIn):
    """Compute what a layer quantised to int8 computes, which stays the owner of the weights.

    For products of int8, XLA on a GPU wants the inputs of a kernel next to each other, and keeps a
    second copy of nearly all weights that way. Here the same whole numbers are multiplied as
    floats, which hold them exactly, and the kernel is widened on its way into the product. What is
    not a program of a GPU calls the layer itself.

    Args:
        layer: the layer, built. Once it has LoRA, or is quantised in another way, it is called.

    Call arguments:
        inputs: float[batch, time, ...].
    """

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Project the inputs; `training` is what the layer takes too, and changes nothing."""
        dense = self.layer
        is_int8 = dense.quantization_mode == "int8" and not dense.lora_enabled
        if target.program_of() != "gpu" or not is_int8:
            return dense(inputs)
        is_einsum = type(dense) is keras.layers.EinsumDense
        scale = ops.convert_to_tensor(dense.kernel_scale)
        own_scale = None
        if dense.inputs_quantizer:
            axis = tuple(range(2, len(inputs.shape))) if is_einsum else -1
            inputs, own_scale = dense.inputs_quantizer(inputs, axis=axis)
        kernel = ops.cast(ops.convert_to_tensor(dense.kernel), self.compute_dtype)
        y = product(dense, ops.cast(inputs, self.compute_dtype), kernel)
        if own_scale is not None:
            if is_einsum:  # one of each token, where a `Dense` has one of each vector
                own_scale = ops.reshape(own_scale, (*ops.shape(y)[:2], *[1] * (len(y.shape) - 2)))
            scale = scale * own_scale
        return finished(dense, y / scale)
