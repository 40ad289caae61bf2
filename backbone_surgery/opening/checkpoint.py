"""Checkpoints of Keras: whether a file of weights is one of this very model.

Keras files its layers under their class and their order among those of that class. Where a model
lost a layer, the weights of its neighbour are loaded into the next one without a word; where it
gained one, or is quantised and the file is not, loading fails half way. The file also holds the
names of the layers and the shapes of their arrays, and that is enough to tell beforehand.
"""

import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras

from backbone_surgery import graph, hosts
from backbone_surgery.errors import WeightMismatchError
from backbone_surgery.files import as_path, read_json, reading, replace_file, writing

_MOST = 2**26
"""Bytes of the index of a checkpoint in shards."""


def check_checkpoint(model: keras.Model, filepath: Any) -> None:
    """Check that a file of weights was saved from a model with the same layers.

    Args:
        model: a Functional model, about to load the file.
        filepath: of the file: `.weights.h5`, `.weights.json` with its shards, or `.keras`.

    Raises:
        WeightMismatchError: the file has other layers, or the same in another order, or other
            arrays in them, or is of another format, in which that cannot be seen.
    """
    if not as_path(filepath, "load_weights").exists():
        return
    if not str(filepath).endswith((".weights.h5", ".weights.json", ".keras")):
        raise WeightMismatchError(
            f"load_weights at '{filepath}': expected a `.weights.h5`, `.weights.json` or `.keras` "
            "file. Received another, which does not tell its layers apart. Load it into the model "
            "that it was saved from, and copy with `transfer_weights`."
        )
    wanted = _layers_of_model(model)
    with reading(filepath, "load_weights", "weights that Keras saved", WeightMismatchError):
        filed = _layers_of_file(Path(filepath))
    if filed is None:
        difference = "one that holds no layers"
    elif set(filed) != set(wanted):
        difference = f"{_names(filed)} where the model has {_names(wanted)}"
    else:
        others = ((filed[key], layer) for key, layer in wanted.items())
        difference = ", ".join(filter(None, (_difference(*pair) for pair in others)))
    if difference:
        raise WeightMismatchError(
            f"load_weights at '{filepath}': expected a file saved from a model with the layers of "
            f"'{model.name}', in their order, quantised as they are. Received "
            f"{difference[:1000]}. Load it into the model that it was saved from, and copy with "
            "`transfer_weights`."
        )


def save(model: keras.Model, filepath: Any, **kwargs: Any) -> None:
    """Save the weights of a model as Keras does; one file in one step, see `replace_file`.

    Raises:
        SurgeryError: the system does not write it, or no process can read all weights.
    """
    hosts.refuse_parts(
        model, "save_weights", "Call `weight_tree(model)` in all of them, and save it in one."
    )
    path, asks = Path(filepath), kwargs.get("overwrite") is False

    def put(part: Path) -> None:
        whole = part.with_name(f"{part.name}.weights.h5")  # no other name may end in anything else
        try:
            model.save_weights(whole, **kwargs)
            os.replace(whole, part)
        finally:
            whole.unlink(missing_ok=True)

    def write() -> None:
        if path.name.endswith(".weights.h5") and "://" not in str(filepath) and not asks:
            replace_file(path, put)
        else:
            model.save_weights(filepath, **kwargs)

    with writing(filepath, "save_weights"):
        hosts.by_first(model, "save_weights", {"path": str(filepath)}, write)


def check_layers(model: keras.Model, file: Path, operation: str) -> None:
    """Check that a file of weights has the layers of a model: Keras passes over any others.

    Args:
        model: a Functional model, which has loaded the file.
        file: `.weights.h5`, or `.weights.json` with its shards.
        operation: named in the error.

    Raises:
        WeightMismatchError: it has more layers, or fewer.
    """
    wanted = _layers_of_model(model)
    with reading(file, operation, "weights that Keras saved", WeightMismatchError):
        filed = _layers_of_file(file) or {}
    if set(filed) != set(wanted):
        raise WeightMismatchError(
            f"{operation} at '{file}': expected the weights of the model that its config "
            f"describes, with {_names(wanted)}. Received {_names(filed)}. Compare the files with "
            "those of the original."
        )


def _difference(filed: "_Filed", layer: keras.Layer) -> str | None:
    """Say how a layer of a file differs from that of the model, if it does."""
    if filed.name != layer.name and not graph.is_auto_named(layer):
        return f"'{filed.name}' where the model has '{layer.name}'"
    weights = (v for v in layer.weights if not v.name.startswith("lora_"))  # saved in the kernel
    arrays = Counter(_array(v.shape, v.dtype) for v in weights)
    more, fewer = filed.arrays - arrays, arrays - filed.arrays
    if not more and not fewer:
        return None
    both = (", ".join(sorted(x.elements())) or "no more" for x in (more, fewer))
    return "'{}' with {} where the model has {}".format(layer.name, *both)


def _layers_of_model(model: keras.Model, at: str = "") -> dict[str, keras.Layer]:
    """Return the layers with weights, those of nested models too, by their places in a file.

    One that is within an earlier one is filed there, and not by itself.
    """
    counts: Counter[str] = Counter()
    layers: dict[str, keras.Layer] = {}
    filed: set[int] = set()
    for layer in model.layers:
        kind = _snake(type(layer).__name__)
        key = f"{at}{kind}_{counts[kind]}" if counts[kind] else f"{at}{kind}"
        counts[kind] += 1
        if layer.weights and id(layer) not in filed:
            layers[key] = layer
            filed.update(map(id, graph.layers_within(layer)))
            if graph.as_functional(layer) is not None:
                layers.update(_layers_of_model(layer, f"{key}/layers/"))
    return layers


@dataclass
class _Filed:
    """A layer in a file: its name, and its arrays, as `_array` writes them."""

    name: str
    arrays: Counter[str] = field(default_factory=Counter)


def _layers_of_file(path: Path) -> dict[str, _Filed] | None:
    """Return the layers with arrays in a file, by what they are filed under."""
    layers: dict[str, _Filed] = {}
    for file in _stores(path):
        for key, group in _groups(file):
            layer = layers.setdefault(key, _Filed(key))
            # Of the shards that a layer is spread over, one has its name.
            layer.name = str(group.get("vars", group).attrs.get("name", layer.name))
            group.visititems(partial(_add, layer.arrays))
    return {key: x for key, x in sorted(layers.items()) if x.arrays} if layers else None


def _add(arrays: Counter[str], name: str, item: Any) -> None:
    """Count an array of a file, unless it is the state of a generator of random numbers."""
    if isinstance(item, h5py.Dataset) and "seed_generator" not in name:
        arrays[_array(item.shape, str(item.dtype))] += 1


def _array(shape: Any, dtype: str) -> str:
    """Write what may not differ of an array: its shape, and whether its numbers are whole."""
    return f"{'int' if 'int' in dtype else 'float'}{list(shape)}"


def _groups(group: h5py.Group, at: str = "") -> Iterator[tuple[str, h5py.Group]]:
    """Walk the groups of layers in a file, those of layers in layers after their own."""
    for key, inner in group.get("layers", {}).items():
        yield f"{at}{key}", inner
        yield from _groups(inner, f"{at}{key}/layers/")


def _stores(path: Path) -> Iterator[h5py.File]:
    """Open the HDF5 files that a file of Keras consists of, one after the other."""
    if path.suffix == ".keras":
        with (
            zipfile.ZipFile(path) as archive,
            archive.open("model.weights.h5") as inner,
            h5py.File(inner, "r") as file,
        ):
            yield file
        return
    shards = [path]
    if path.suffix == ".json":
        listed = read_json(path, _MOST)["weight_map"].values()
        names = {name for x in listed for name in (x if isinstance(x, list) else [x])}
        shards = [path.with_name(name) for name in sorted(names)]
    for shard in shards:
        with h5py.File(shard, "r") as file:
            yield file


def _names(layers: Any) -> str:
    return f"{len(layers)} layers with weights ({', '.join(list(layers)[:12])})"


def _snake(name: str) -> str:
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
