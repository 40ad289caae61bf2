"""Layers that are known to work on each token alone, and need no probe."""

import types
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import layers, tree

from backbone_surgery import graph
from backbone_surgery.caching.projection import works_by_token
from backbone_surgery.graph.twin import Twin
from backbone_surgery.opening.family import Family

_POINTWISE = {
    layers.Activation,
    layers.Add,
    layers.Average,
    layers.Dense,
    layers.Dropout,
    layers.EinsumDense,
    layers.Embedding,
    layers.Identity,
    layers.LayerNormalization,
    layers.Multiply,
    layers.RMSNormalization,
    layers.ReversibleEmbedding,
    layers.Subtract,
}
_ARITHMETIC = ("Add", "Divide", "Multiply", "Subtract", "TrueDivide")
"""What `+`, `-`, `*` and `/` of tensors of a graph are."""
_OWN = "backbone_surgery"
_LIBRARIES = ("keras", "keras_hub", _OWN)
_ACTIVATIONS = ("keras.src.activations.", "keras_hub.")
"""Where the functions are that keep to the last axis."""


def is_known(operation: Any, args: tuple, kwargs: dict[str, Any], family: Family) -> bool:
    """Tell whether a node of a graph works on each token alone, by its class and settings."""
    kind = type(operation)
    if isinstance(operation, Twin) or getattr(operation.call, "__func__", None) is not kind.call:
        return False  # it runs something else than its class does
    if _library(operation) == _OWN:
        return all(_library(layer) in _LIBRARIES for layer in graph.sublayers(operation))
    rotates = isinstance(operation, keras_hub.layers.RotaryEmbedding)
    rotates = rotates and _library(operation) in _LIBRARIES
    if rotates or isinstance(operation, family.position_layers):
        return "positions" in kwargs
    if kind in family.pointwise_layers:
        return True
    flat = tree.flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, keras.KerasTensor)]
    if kind.__module__ == "keras.src.ops.numpy" and kind.__name__ in _ARITHMETIC:
        return len(tensors) == 1 and all(t is tensors[0] or np.ndim(t) == 0 for t in flat)
    return kind in _POINTWISE and _is_plain(operation) and not any(map(_ends_in_tokens, tensors))


def _ends_in_tokens(tensor: keras.KerasTensor) -> bool:
    """Tell whether the last axis of a tensor counts tokens or slots, and no features."""
    return keras.backend.is_float_dtype(tensor.dtype) and tensor.shape[-1:] == (None,)


def _is_plain(layer: keras.Layer) -> bool:
    """Tell whether a layer of Keras keeps to the last axis, and runs no function of a user."""
    activation = getattr(layer, "activation", None)
    if activation is not None and not _keeps_to_last_axis(activation):
        return False
    if isinstance(layer, layers.EinsumDense):
        return works_by_token(layer)
    return getattr(layer, "axis", -1) in (-1, [-1], (-1,))


def _keeps_to_last_axis(activation: Any) -> bool:
    """Tell whether an activation is one of Keras's functions: a layer may work on any axis."""
    module = getattr(activation, "__module__", None) or ""
    return isinstance(activation, types.FunctionType) and module.startswith(_ACTIVATIONS)


def _library(layer: Any) -> str:
    return "" if isinstance(layer, Twin) else type(layer).__module__.partition(".")[0]
