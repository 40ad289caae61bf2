"""Configs of layers: what a recipe keeps of a layer besides its weights.

Only classes that are built into Keras and KerasHub, or that the user registered in this process,
are ever named or made; a function is neither saved nor loaded, nor is a layer that reads files or
runs code of another framework. No module is imported that a config names.
"""

import copy
import json
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.errors import RecipeError, SurgeryError

_MODULES = {
    "keras": keras,
    **{
        f"keras.{name}": getattr(keras, name)
        for name in (
            *("layers", "initializers", "regularizers", "constraints", "dtype_policies"),
            *("quantizers", "random"),
        )
    },
    "keras_hub.layers": keras_hub.layers,
}
"""The modules in whose names Keras describes what is built in. The layers of KerasHub, and those
of the user, have registered names."""

_REFUSED = (
    *(keras.layers.Lambda, keras.layers.TFSMLayer, keras.layers.TorchModuleWrapper),
    *(keras.layers.JaxLayer, keras.layers.FlaxLayer),
    *(keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization),
    *(keras_hub.tokenizers.Tokenizer, keras_hub.models.Preprocessor),
    *(keras_hub.layers.AudioConverter, keras_hub.layers.ImageConverter),
    *(keras_hub.models.Backbone, keras_hub.models.Task),
)
"""Layers that run code, or read files, which their configs name; converters of data, which run in
no graph; and whole models, of as many layers as they say."""


def layer_config(layer: keras.layers.Layer, where: str) -> dict[str, Any]:
    """Return the config of a layer, after trying that it makes such a layer again."""
    try:
        config = _plain(keras.saving.serialize_keras_object(layer))
        config = json.loads(json.dumps(config, allow_nan=False))
        check_config(config, where, SurgeryError)
        _try_to_make(config, layer, where)
    except SurgeryError:
        raise
    except Exception as error:
        raise SurgeryError(
            f"save_recipe at '{where}': expected a layer that its config describes. Received "
            f"'{layer.name}' of type {type(layer).__name__}, where {str(error)[:200]}. Give the "
            "class a `get_config`."
        ) from error
    return config


def _try_to_make(config: dict[str, Any], layer: keras.layers.Layer, where: str) -> None:
    """Make and build a layer as `load_recipe` will, without memory for its weights."""
    made: list[keras.Variable] = []
    with graph.deferred(made):
        try:
            again = make_layer(config, where)
            _build_like(again, layer)
        except Exception as error:
            if "stateless scope" not in f"{error} {error.__cause__}":
                raise
            raise SurgeryError(
                f"save_recipe at '{where}': expected a layer that makes its weights by "
                "`add_weight`, whose sizes can be checked before they take memory. Received "
                f"'{layer.name}', which makes a variable out of an array. Give `add_weight` a "
                "shape and an initializer."
            ) from error
        made.clear()
    pairs = zip(graph.layers_within(layer), graph.layers_within(again), strict=False)
    if any(a.built and b.built and _alpha(a) != _alpha(b) for a, b in pairs):
        raise SurgeryError(
            f"save_recipe at '{where}': expected LoRA whose alpha is its rank, since Keras forgets "
            f"any other in the config of some layers. Received '{layer.name}'. Use `LowRank`."
        )


def _build_like(again: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Build a layer as another was, where Keras can; where it cannot, a call will build it."""
    shapes = layer.get_build_config() if layer.built else None
    if not shapes or again.built:
        return
    try:
        again.build_from_config(shapes)
    except Exception as error:
        if "stateless scope" in str(error):
            raise


def _alpha(layer: keras.layers.Layer) -> Any:
    return getattr(layer, "lora_alpha", None)


def check_config(config: Any, where: str, error: type[SurgeryError] = RecipeError) -> None:
    """Check that a config names built-in or registered classes alone, and never a function."""
    if isinstance(config, list):
        for item in config:
            check_config(item, where, error)
    elif isinstance(config, dict):
        if "class_name" in config and not _allowed(config):
            raise error(
                f"recipe at '{where}': expected a layer that is built into Keras or KerasHub, or "
                "registered in this process by `keras.saving.register_keras_serializable`. "
                f"Received '{str(config['class_name'])[:80]}'. Register the class; functions and "
                "Lambda layers are never saved, nor are layers that read files."
            )
        for item in config.values():
            check_config(item, where, error)


def _allowed(config: dict[str, Any]) -> bool:
    name, registered, module = (
        config.get(key) for key in ("class_name", "registered_name", "module")
    )
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        return False
    found = keras.saving.get_registered_object(registered) if isinstance(registered, str) else None
    if found is None:
        found = getattr(_MODULES.get(str(module)), name, None)
    return isinstance(found, type) and not issubclass(found, _REFUSED)


def unnamed(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out a name that Keras made up: another layer of this process may have it.

    A model of layers keeps its name, which its config must have.
    """
    inner = config.get("config")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or "layers" in inner:
        return config
    if not graph.is_made_up(inner["name"], str(config.get("class_name"))):
        return config
    return {**config, "config": {key: v for key, v in inner.items() if key != "name"}}


def make_layer(config: dict[str, Any], where: str) -> keras.layers.Layer:
    """Make a layer of a checked config."""
    try:
        # A copy, since some layers take parts out of the config that they are made of.
        layer = keras.saving.deserialize_keras_object(copy.deepcopy(config), safe_mode=True)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RecipeError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise RecipeError(
            f"recipe at '{where}': expected the config of a layer. Received one where "
            f"{str(error)[:200]}. The recipe is damaged, or was made by another release of Keras."
        ) from error
    if not isinstance(layer, keras.layers.Layer):
        raise RecipeError(
            f"recipe at '{where}': expected the config of a layer. Received that of a "
            f"{type(layer).__name__}. The recipe is damaged; get it again."
        )
    return layer


def _plain(config: Any) -> Any:
    """Leave out of a config what only says how its layers were built and compiled."""
    if isinstance(config, dict):
        kept = {k: v for k, v in config.items() if k not in ("build_config", "compile_config")}
        return {key: _plain(value) for key, value in kept.items()}
    return [_plain(v) for v in config] if isinstance(config, list | tuple) else config
