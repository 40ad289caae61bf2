"""Configs of layers: what a recipe keeps of a layer besides its weights.

Only classes that are built into Keras and KerasHub, or that the user registered in this process,
are ever named or made; a function is neither saved nor loaded, nor is a layer that reads files or
runs code of another framework. No module is imported that a config names.
"""

import copy
import json
import math
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.files import reading

_BUILT_IN = "layers initializers regularizers constraints dtype_policies quantizers random"
_MODULES = {f"keras.{name}": getattr(keras, name) for name in _BUILT_IN.split()} | {
    "keras": keras,
    "keras_hub.layers": keras_hub.layers,
}
"""The modules that configs of built-in classes name; other classes have registered names."""

_ARRAYS = ("__numpy__", "__tensor__")
"""What Keras calls arrays in configs, such as the scale of `Rescaling`."""

_DTYPES = ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "bool")
"""Those of arrays that a config may hold."""

REFUSED = (
    *(keras.layers.Lambda, keras.layers.TFSMLayer, keras.layers.TorchModuleWrapper),
    *(keras.layers.JaxLayer, keras.layers.FlaxLayer),
    *(keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization),
    *(keras_hub.tokenizers.Tokenizer, keras_hub.models.Preprocessor),
    *(keras_hub.layers.AudioConverter, keras_hub.layers.ImageConverter),
    *(keras_hub.models.Backbone, keras_hub.models.Task),
)
"""Layers that run code or read files that their configs name, converters of data, whole models."""


def layer_config(layer: keras.layers.Layer, where: str) -> dict[str, Any]:
    """Return the config of a layer, after making such a layer of it once."""
    expected, advice = "a layer that its config describes", "Give the class a `get_config`."
    with reading(where, "save_recipe", expected, advice=advice):
        config = _plain(keras.saving.serialize_keras_object(layer))
        _check_finite(config, where)
        config = json.loads(json.dumps(config))
        make_layer(config, where)
    tuned = (x for x in graph.layers_within(layer) if getattr(x, "lora_enabled", False))
    if any(x.lora_alpha != x.lora_rank for x in tuned):
        raise SurgeryError(
            f"save_recipe at '{where}': expected LoRA whose alpha is its rank, since some layers "
            f"of Keras forget any other. Received '{layer.name}'. Use `LowRank`."
        )
    return config


def _check_finite(config: Any, where: str) -> None:
    """Refuse numbers that JSON does not have."""
    inner = config.values() if isinstance(config, dict) else config
    for item in inner if isinstance(config, dict | list | tuple) else ():
        _check_finite(item, where)
    if isinstance(config, float) and not math.isfinite(config):
        raise SurgeryError(
            f"save_recipe at '{where}': expected a layer whose config holds finite numbers. "
            f"Received {config}. Give the layer others, or a class of its own that makes them."
        )


def make_layer(config: Any, where: str) -> keras.layers.Layer:
    """Make a layer of a config, which is checked before; what is malformed raises any error."""
    check_config(config, where)
    # A copy, since some layers take parts out of the config that they are made of.
    layer = keras.saving.deserialize_keras_object(_unnamed(copy.deepcopy(config)))
    if not isinstance(layer, keras.layers.Layer):
        raise TypeError(f"{type(layer).__name__} is no layer")
    return layer


def check_config(config: Any, where: str) -> None:
    """Check that a config names built-in or registered classes alone, and never a function."""
    if isinstance(config, dict) and "class_name" in config and not _allowed(config):
        raise RecipeError(
            f"recipe at '{where}': expected a layer that is built into Keras or KerasHub, or "
            "registered in this process by `keras.saving.register_keras_serializable`. "
            f"Received '{str(config['class_name'])[:80]}'. Register the class; functions and "
            "Lambda layers are never saved, nor are layers that read files."
        )
    inner = config.values() if isinstance(config, dict) else config
    for item in inner if isinstance(config, dict | list) else ():
        check_config(item, where)


def _allowed(config: dict[str, Any]) -> bool:
    if config["class_name"] in _ARRAYS and {*config} == {"class_name", "config"}:
        inner = config["config"]
        if not isinstance(inner, dict) or {*inner} != {"value", "dtype"}:
            return False
        return isinstance(inner["value"], list) and inner["dtype"] in _DTYPES
    keys = ("class_name", "registered_name", "module")
    name, registered, module = (config.get(key) for key in keys)
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        return False
    cls = keras.saving.get_registered_object(registered) if isinstance(registered, str) else None
    if cls is None:
        cls = getattr(_MODULES.get(str(module)), name, None)
    return isinstance(cls, type) and not issubclass(cls, REFUSED)


def _unnamed(config: Any) -> Any:
    """Leave out a name that Keras made up: another layer of this process may have it.

    A model of layers keeps its name, which its config must have.
    """
    inner = config.get("config") if isinstance(config, dict) else None
    if isinstance(inner, dict) and isinstance(inner.get("name"), str) and "layers" not in inner:
        if graph.is_made_up(inner["name"], str(config.get("class_name"))):
            del inner["name"]
    return config


def _plain(config: Any) -> Any:
    """Leave out of a config what only says how its layers were built and compiled."""
    if isinstance(config, dict):
        kept = {k: v for k, v in config.items() if k not in ("build_config", "compile_config")}
        return {key: _plain(value) for key, value in kept.items()}
    return [_plain(v) for v in config] if isinstance(config, list | tuple) else config
