"""`WholeNorm`: a `LayerNormalization` written as one kernel of a GPU computes it."""

from typing import Any

import keras
from keras import ops

from backbone_surgery import target
from backbone_surgery.caching.stand_in import StandIn


def is_layer_norm(layer: Any) -> bool:
    """Tell whether a layer can be run by a `WholeNorm`."""
    if type(layer) is not keras.layers.LayerNormalization:
        return False
    return layer.axis == [-1] and not layer.rms_scaling


class WholeNorm(StandIn):
    """Compute what a `LayerNormalization` computes, which stays the owner of the weights.

    Keras takes the mean and the variance first, each in a kernel of its own. Here each step is a
    sum that goes back to all it was made of, which XLA on a GPU makes one kernel. On a CPU the
    layer itself is called.

    Args:
        layer: the layer, built.
    """

    def call(self, inputs: Any) -> Any:
        """Normalize the inputs, float[..., features]."""
        norm = self.layer
        if target.platform() == "cpu":
            return norm(inputs)
        x = ops.cast(inputs, "float32")
        x = x - ops.mean(x, axis=-1, keepdims=True)
        x = x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + norm.epsilon)
        x = x if norm.gamma is None else x * ops.cast(norm.gamma, "float32")
        x = x if norm.beta is None else x + ops.cast(norm.beta, "float32")
        return ops.cast(x, self.compute_dtype)
