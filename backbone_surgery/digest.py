"""A digest of weights, to tell whether two models have the same."""

import hashlib

import keras
import numpy as np


def weights_digest(model: keras.Model) -> str:
    """Return a sha256 over shapes, dtypes and values of the variables of a model, in order."""
    digest = hashlib.sha256()
    for variable in model.variables:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{variable.dtype}{tuple(value.shape)}".encode())
        digest.update(value.view(np.uint8).data if value.ndim else value.tobytes())
    return digest.hexdigest()
