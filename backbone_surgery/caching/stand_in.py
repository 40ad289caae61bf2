"""`StandIn`: a layer that runs another one in a way that suits a chip better."""

from typing import Any

import keras

from backbone_surgery import graph


class StandIn(keras.layers.Layer):
    """Compute what a layer computes, which stays the owner of the weights.

    Args:
        layer: the layer, built.
        name: another name than that of the layer.
    """

    __new__ = graph.new_layer

    def __init__(self, layer: keras.layers.Layer, name: str | None = None) -> None:
        dtype = layer.dtype_policy
        if layer.quantization_mode is not None:  # as it was before: only the layer is quantised
            is_mixed = layer.variable_dtype != layer.compute_dtype
            dtype = f"mixed_{layer.compute_dtype}" if is_mixed else layer.compute_dtype
        super().__init__(dtype=dtype, name=name or layer.name, autocast=layer.autocast)
        self.layer = layer
        self.built = True
        self.supports_masking = layer.supports_masking

    def compute_output_spec(self, inputs: Any, training: Any = None) -> Any:
        """Return what the layer says of itself."""
        return self.layer.compute_output_spec(inputs)
