"""Layers that are known to work on each token alone, and need no probe."""

from typing import Any

import keras
from keras import layers

from backbone_surgery import graph
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
_OWN = "backbone_surgery"
_LIBRARIES = ("keras", "keras_hub", _OWN)


def is_known(operation: Any, kwargs: dict[str, Any], family: Family) -> bool:
    """Tell whether a node of a graph works on each token alone, by its class and settings."""
    kind = type(operation)
    if isinstance(operation, Twin) or getattr(operation.call, "__func__", None) is not kind.call:
        return False  # it runs something else than its class does
    if _library(operation) == _OWN:
        return all(_library(layer) in _LIBRARIES for layer in graph.sublayers(operation))
    if isinstance(operation, family.position_layers):
        return "positions" in kwargs
    if kind in family.pointwise_layers:
        return True
    return kind in _POINTWISE and _is_plain(operation)


def _is_plain(layer: keras.Layer) -> bool:
    """Tell whether a layer of Keras keeps to the last axis, and runs no function of a user."""
    activation = getattr(layer, "activation", None)
    if activation is not None and _module(activation) not in _LIBRARIES:
        return False
    if isinstance(layer, layers.EinsumDense):
        x, kernel, y = layer.equation.replace("->", ",").split(",")
        return x[:2] == y[:2] and not set(x[:2]) & set(kernel)
    return getattr(layer, "axis", -1) in (-1, [-1], (-1,))


def _library(layer: Any) -> str:
    return "" if isinstance(layer, Twin) else _module(type(layer))


def _module(thing: Any) -> str:
    return getattr(thing, "__module__", "").partition(".")[0]
