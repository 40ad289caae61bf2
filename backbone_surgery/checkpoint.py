"""Checkpoints of Keras: whether a `.weights.h5` file is one of this very model.

Keras files its layers under their class and their order among those of that class. Where a model
lost a layer, the weights of its neighbour are loaded into the next one without a word; where it
gained one, loading fails half way. The file also holds the names of the layers, and that is enough
to tell before anything is loaded.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import keras

from backbone_surgery import graph
from backbone_surgery.errors import WeightMismatchError


def check_checkpoint(model: keras.Model, filepath: Any) -> None:
    """Check that a `.weights.h5` file was saved from a model with the same layers.

    Files in other formats are left to Keras, which refuses or knows them.

    Args:
        model: a Functional model, about to load the file.
        filepath: of the file.

    Raises:
        WeightMismatchError: the file has other layers, or the same in another order.
    """
    if not str(filepath).endswith(".weights.h5") or not Path(filepath).is_file():
        return
    wanted = _layers_of_model(model)
    found = _layers_of_file(filepath)
    if found is None:
        difference = "one that holds no layers"
    elif set(found) != set(wanted):
        difference = f"{_names(found)} where the model has {_names(wanted)}"
    else:
        wrong = [
            f"'{found[key]}' where the model has '{layer.name}'"
            for key, layer in wanted.items()
            if found[key] != layer.name and not graph.is_auto_named(layer)
        ]
        difference = ", ".join(wrong)
    if difference:
        raise WeightMismatchError(
            f"load_weights at '{filepath}': expected a file saved from a model with the layers of "
            f"'{model.name}', in their order. Received {difference}. Load it into the model that "
            "it was saved from, and copy with `transfer_weights`."
        )


def _layers_of_model(model: keras.Model) -> dict[str, keras.Layer]:
    """Return the layers with weights under the names that Keras files them by."""
    counts: Counter[str] = Counter()
    layers = {}
    for layer in model.layers:
        kind = _snake(type(layer).__name__)
        layers[f"{kind}_{counts[kind]}" if counts[kind] else kind] = layer
        counts[kind] += 1
    return {key: layer for key, layer in layers.items() if layer.weights}


def _layers_of_file(filepath: Any) -> dict[str, str] | None:
    """Return the names of the layers with arrays in a file, by what they are filed under."""
    with h5py.File(filepath, "r") as file:
        if "layers" not in file:
            return None
        groups = {key: group for key, group in file["layers"].items() if _has_arrays(group)}
        names = {key: group["vars"].attrs.get("name", key) for key, group in groups.items()}
    return {key: str(name) for key, name in names.items()}


def _has_arrays(group: h5py.Group) -> bool:
    return group.visititems(lambda _, x: True if isinstance(x, h5py.Dataset) else None) is True


def _names(layers: Any) -> str:
    return f"{len(layers)} layers with weights ({', '.join(list(layers)[:12])})"


def _snake(name: str) -> str:
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
