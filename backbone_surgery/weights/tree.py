"""The weights of a model as values: nested dicts of arrays, and a digest that tells them apart."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError
from backbone_surgery.files import STORABLE
from backbone_surgery.weights.arrays import Array, of_value, of_variable
from backbone_surgery.weights.paths import resolve, variable_paths


def weight_tree(model: Any) -> dict[str, Any]:
    """Return the weights of a model as nested dicts, a snapshot that later changes do not touch.

    The weights are addressed as the model that owns them has them: an edit renames none of them.

    Args:
        model: a Keras model, a causal LM task, or what `operate` or `rewire` made.

    Returns:
        Nested dicts of NumPy arrays, in the variables' own dtypes and shapes, as in
        `{"blocks": {"0": {..., "kernel": array}}, ...}`. A variable that several layers share is
        there once.

    Raises:
        SurgeryError: `model` has no weights.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> tree = bs.weight_tree(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> tree["blocks"]["1"]["self_attention"]["query"]["kernel"].shape
        (8, 2, 4)
    """
    tree: dict[str, Any] = {}
    for path, variable in _agreed(model, "weight_tree").items():
        *scopes, name = path.split(".")
        inner = tree
        for scope in scopes:
            inner = inner.setdefault(scope, {})
        inner[name] = of_variable(variable).read().copy()
    return tree


def weights_digest(model: Any) -> str:
    """Return `"sha256:..."` of the paths, shapes, dtypes and bits of a model's weights.

    Args:
        model: whatever `weight_tree` takes.
    """
    return digest(_agreed(model, "weights_digest"))


def _agreed(model: Any, operation: str) -> dict[str, keras.Variable]:
    """Return the variables of a model by path, the same in all processes that hold it."""
    model = resolve(model, operation)
    variables = variable_paths(model)
    shapes = [f"{path} {of_variable(variable)}" for path, variable in variables.items()]
    hosts.agree(model, operation, {"weights": shapes})
    return variables


def digest(variables: Mapping[str, keras.Variable]) -> str:
    """Return the digest of variables by path, reading one at a time."""
    total = hashlib.sha256()
    for path, variable in sorted(variables.items()):
        array = of_variable(variable)
        total.update(f"{path} {array}\n".encode())
        total.update(np.ascontiguousarray(array.read()).reshape(-1).view(np.uint8).data)
    return f"sha256:{total.hexdigest()}"


def flatten(tree: Mapping[Any, Any]) -> dict[str, Array | None]:
    """Return the leaves of a weight tree by path; keys may be paths themselves.

    Raises:
        SurgeryError: a leaf is neither an array nor `None`, or a path occurs twice.
    """
    arrays: dict[str, Array | None] = {}
    for path, leaf in _leaves(tree, ""):
        if path in arrays:
            raise SurgeryError(
                f"transfer_weights at '{path}': expected each path once. Received two arrays for "
                "it. Remove one from the tree."
            )
        arrays[path] = None if leaf is None else _leaf(path, leaf)
    return arrays


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
    value = hosts.to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf
    if not isinstance(value, np.ndarray | np.generic) or value.dtype not in STORABLE:
        raise SurgeryError(
            f"transfer_weights at '{path}': expected an array of numbers, or None to leave the "
            f"weight as it is. Received {type(leaf).__name__}. Pass arrays, as `weight_tree` does."
        )
    return of_value(np.asarray(value))
