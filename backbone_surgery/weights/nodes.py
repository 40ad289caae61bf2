"""The nodes of a graph as data, which tell two graphs apart whose weights are the same."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from backbone_surgery import graph


def describe_nodes(model: keras.Model) -> dict[str, Any]:
    """Describe each node of a graph: its layer, what it is given, and which use of it this is.

    Names that Keras made up are left out, so that the same graph reads the same in any process. Of
    arrays, and of the config of the layer, a digest is kept.
    """
    tensors: dict[int, str] = {}
    layers: dict[Any, int] = {}
    described = {}
    for i, node in enumerate(graph.all_nodes(model)):
        layer = node.operation
        tensors.update({id(t): f"{i}.{j}" for j, t in enumerate(node.outputs)})
        name = re.sub(r"_\d+$", "", layer.name) if graph.is_auto_named(layer) else layer.name
        leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        described[f"node {i:04}"] = [
            *(type(layer).__name__, name, layers.setdefault(layer, len(layers))),
            [_argument(x, tensors) for x in leaves],
            sorted(node.arguments.kwargs),
            _settings(layer),
        ]
    return described


def _argument(value: Any, tensors: Mapping[int, str]) -> Any:
    if isinstance(value, keras.KerasTensor):
        return f"tensor {tensors.get(id(value), 'outside')}"
    if isinstance(value, np.ndarray | np.generic) or keras.ops.is_tensor(value):
        array = np.asarray(keras.ops.convert_to_numpy(value))
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
        return f"{array.dtype.name}{[*array.shape]} {digest}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    known = isinstance(value, float | slice | type(...) | np.dtype)
    return repr(value) if known else type(value).__name__


def _settings(operation: Any) -> list[Any]:
    """Return the dtypes of a layer and of those in it, and a digest of what it was made with.

    There is none where that is told by nodes, or where the class does not tell it.
    """
    if graph.as_functional(operation) is not None:
        return []
    if not isinstance(operation, keras.layers.Layer):
        return [_digest(operation, ("name",))]
    within = graph.layers_within(operation)
    dtypes = [f"{layer.compute_dtype} {layer.variable_dtype}" for layer in within]
    tells = type(operation).get_config is not keras.layers.Layer.get_config
    return [*dtypes, _digest(operation, ("name", "trainable", "dtype")) if tells else None]


def _digest(operation: Any, without: tuple[str, ...]) -> str | None:
    try:
        text = json.dumps(_compared(operation.get_config(), without), sort_keys=True)
    except (NotImplementedError, TypeError, ValueError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compared(config: Any, without: tuple[str, ...]) -> Any:
    """Leave out of a config what may differ between two of the same, such as made-up names."""
    if isinstance(config, Mapping):
        kept = (key for key in config if key not in without)
        return {key: _compared(config[key], without) for key in kept}
    return [_compared(x, without) for x in config] if isinstance(config, list | tuple) else config
