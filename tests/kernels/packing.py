"""Matrices of four bits, as Keras packs them."""

import jax.numpy as jnp
import keras
import numpy as np

from backbone_surgery.kernels.packed import Packed


def pack(rng, pairs, inputs, outputs, group, dtype):
    """Return a matrix of four bits as Keras packs it, and the same as floats."""
    numbers = rng.integers(-8, 8, (inputs, outputs), dtype="int8")
    axis = 1 if pairs == "outputs" else 0
    packed = np.asarray(keras.quantizers.pack_int4(numbers, axis=axis)[0])
    scale = zero = None
    wanted = numbers.astype("float64")
    if group:
        shape = (inputs // group, outputs)
        scale, zero = (
            jnp.asarray(rng.random(shape) + 0.5, dtype),
            rng.integers(-8, 8, shape, "int8"),
        )
        of_inputs = (np.repeat(np.asarray(x, "float64"), group, axis=0) for x in (zero, scale))
        wanted = (wanted - next(of_inputs)) * next(of_inputs)
    if pairs == "turned":
        packed, scale, zero = (None if x is None else x.T for x in (packed, scale, zero))
    return Packed(packed, pairs, inputs, outputs, group or inputs, scale, zero), wanted
