"""Weight trees: the weights of a model as nested dicts of arrays."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.weights.arrays import NAMES, Array
from backbone_surgery.weights.paths import variable_paths


def weight_tree(model: Any) -> dict[str, Any]:
    """Return the weights of a model as nested dicts, a snapshot that later changes do not touch.

    The weights are addressed as the model that owns them has them: an edit renames none of them.

    Args:
        model: a Keras model, a causal LM task, or what `operate` or `rewire` made.

    Returns:
        `{"blocks": {"0": {..., "kernel": array}}, ...}`: NumPy arrays of the variables' own dtypes
        and shapes, and nothing but arrays. A variable that several layers share is there once.

    Raises:
        SurgeryError: `model` has no weights.

    Example:
        >>> import backbone_surgery as bs, keras_hub
        >>> tree = bs.weight_tree(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> tree["blocks"]["1"]["self_attention"]["query"]["kernel"].shape
        (8, 2, 4)
    """
    tree: dict[str, Any] = {}
    for path, variable in variable_paths(model).items():
        *scopes, name = path.split(".")
        inner = tree
        for scope in scopes:
            inner = inner.setdefault(scope, {})
        inner[name] = of_variable(variable).read().copy()
    return tree


def of_variable(variable: keras.Variable) -> Array:
    """Wrap a variable as an array to be read when it is needed."""
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    shape = tuple(variable.shape)
    return Array(dtype, shape, lambda: keras.ops.convert_to_numpy(variable), variable)


def flatten(tree: Mapping[Any, Any]) -> dict[str, Array | None]:
    """Return the leaves of a weight tree by path; keys may be paths themselves.

    Raises:
        SurgeryError: a leaf is neither an array nor `None`, or a path occurs twice.
    """
    found: dict[str, Array | None] = {}
    for path, leaf in _leaves(tree, ""):
        if path in found:
            raise SurgeryError(
                f"transfer_weights at '{path}': expected each path once. Received two arrays for "
                "it. Remove one from the tree."
            )
        found[path] = None if leaf is None else _leaf(path, leaf)
    return found


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _leaf(path: str, leaf: Any) -> Array:
    if isinstance(leaf, keras.Variable):
        return of_variable(leaf)
    value = keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf
    if not isinstance(value, np.ndarray | np.generic) or value.dtype not in NAMES:
        raise SurgeryError(
            f"transfer_weights at '{path}': expected an array of numbers, or None to leave the "
            f"weight as it is. Received {type(leaf).__name__}. Pass arrays, as `weight_tree` does."
        )
    array = np.asarray(value)
    return Array(array.dtype, array.shape, lambda: array)
