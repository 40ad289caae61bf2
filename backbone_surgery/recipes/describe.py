"""Rewrites as JSON and back, with their arrays and layers kept aside.

A rewrite says all there is to say about it by Keras's own protocol, `get_config` and
`from_config`, and so does a control vector in one. Numbers, strings, lists, tuples and dicts become
JSON. Arrays go into a file of arrays, under the path of their field. A layer becomes its config. A
class or function becomes its name in Keras's registry; what is not registered has no description.
"""

import math
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import keras
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.errors import RecipeError, SurgeryError, closest
from backbone_surgery.files import STORABLE
from backbone_surgery.recipes.configs import REFUSED, layer_config, make_layer
from backbone_surgery.rewriting import Rewrite

_DEPTH = 16
_REGISTER = "`@keras.saving.register_keras_serializable(package)`"
_INSTEAD = (
    "Use Insert, Replace or Wrap to put a layer somewhere, Skip, Remove, Repeat or Reorder to "
    "change the order of blocks, Steer, Patch or Ablate to change what flows between them, or "
    f"write a `SiteRewrite` and register it by {_REGISTER}."
)


class Describer:
    """Turns rewrites over a backbone into JSON, and collects their arrays and layers.

    Attributes:
        arrays: what the fields hold, by path.
        layers: config of each layer in them, once.
    """

    def __init__(self, owner: keras.Model) -> None:
        self.owned = {id(variable) for variable in owner.weights}
        self.arrays: dict[str, np.ndarray] = {}
        self.layers: list[dict[str, Any]] = []
        self._places: dict[keras.layers.Layer, tuple[int, str]] = {}

    def rewrite(self, rewrite: Any, where: str) -> dict[str, Any]:
        """Describe one rewrite; `where` is its path, such as `rewrites.0`."""
        if not isinstance(rewrite, Rewrite):
            name = getattr(rewrite, "__name__", type(rewrite).__name__)
            raise SurgeryError(
                f"save_recipe at '{where}': expected a rewrite, which describes itself. Received "
                f"the function '{name}', which does not. {_INSTEAD}"
            )
        return self._object(rewrite, where)

    def value(self, value: Any, where: str) -> Any:
        """Describe the value of a field."""
        if where.count(".") > _DEPTH:
            raise SurgeryError(
                f"save_recipe at '{where[:40]}': expected values nested at most {_DEPTH} deep. "
                "Received deeper ones. Nest less."
            )
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float) and not isinstance(value, np.generic):
            if not math.isfinite(value):
                raise SurgeryError(
                    f"save_recipe at '{where}': expected a finite number. Received {value}. "
                    "Change the rewrite."
                )
            return value
        if isinstance(value, Mapping):
            keys = [int(key) if isinstance(key, np.integer) else key for key in value]
            if any(type(key) not in (int, str) for key in keys):
                raise _no_description(where, value)
            items = enumerate(zip(keys, value.values(), strict=True))
            return {"dict": [[k, self.value(v, f"{where}.{i}")] for i, (k, v) in items]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.value(v, f"{where}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, keras.layers.Layer):
            return {"layer": self._layer(value, where)}
        if isinstance(value, Rewrite) or _can_hold(type(value)):
            return {"object": self._object(value, where)}
        if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
            value = hosts.to_numpy(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype in STORABLE:
            self.arrays[where] = np.asarray(value)
            return {"scalar" if isinstance(value, np.generic) else "array": where}
        if isinstance(value, type | FunctionType) and _registered(value):
            return {"registered": keras.saving.get_registered_name(value)}
        raise _no_description(where, value)

    def check_kept(self, variables: Iterable[keras.Variable]) -> None:
        """Check that all weights of the layers are among the variables that a recipe keeps."""
        kept = {id(v) for v in variables}
        holders: dict[int, str] = {}
        for layer, (_, where) in self._places.items():
            for other in {holders.setdefault(id(v), where) for v in layer.weights} - {where}:
                raise SurgeryError(
                    f"save_recipe at '{where}': expected layers that share no weights. Received "
                    f"'{layer.name}', with weights of the one at '{other}'. Use one layer twice."
                )
            if any(id(v) not in kept for v in layer.weights):
                raise SurgeryError(
                    f"save_recipe at '{where}': expected a layer that runs in the edited graph, "
                    f"whose weights a recipe keeps. Received '{layer.name}', which does not run "
                    "there. Leave out its rewrite, or hold its weights as arrays."
                )

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if not _can_hold(type(value)):
            raise SurgeryError(
                f"save_recipe at '{where}': expected a rewrite of a registered class. Received "
                f"{type(value).__name__}. Decorate the class with {_REGISTER}, and make it a "
                "frozen dataclass."
            )
        fields = value.get_config()
        _check_files(type(value), fields, where)
        return {
            "type": keras.saving.get_registered_name(type(value)),
            "fields": {name: self.value(v, f"{where}.{name}") for name, v in fields.items()},
        }

    def _layer(self, layer: keras.layers.Layer, where: str) -> int:
        """Describe a layer by its config, once, and return its number."""
        if layer not in self._places:
            if any(id(v) in self.owned for v in layer.weights):
                raise SurgeryError(
                    f"save_recipe at '{where}': expected a layer of the rewrite's own. Received "
                    f"'{layer.name}', a layer of the backbone. Name its place by a site or a block."
                )
            self._places[layer] = len(self.layers), where
            self.layers.append(layer_config(layer, where))
        return self._places[layer][0]


class Rebuilder:
    """Turns JSON back into rewrites. What is malformed raises any error."""

    def __init__(self, arrays: Mapping[str, np.ndarray], configs: list[Any]) -> None:
        self.arrays, self.configs = arrays, configs
        self._layers: dict[int, keras.layers.Layer] = {}

    def rewrite(self, described: dict[str, Any]) -> Rewrite:
        """Rebuild one rewrite."""
        rewrite = self._object(**described)
        if not isinstance(rewrite, Rewrite):
            raise TypeError(f"{type(rewrite).__name__} is no rewrite")
        return rewrite

    def value(self, described: Any) -> Any:
        """Rebuild the value of a field."""
        if described is None or isinstance(described, bool | int | float | str):
            return described
        ((kind, inner),) = described.items()
        match kind, inner:
            case "list" | "tuple", list():
                items = [self.value(x) for x in inner]
                return items if kind == "list" else tuple(items)
            case "dict", list():
                return {key: self.value(x) for key, x in inner}
            case "array" | "scalar", str():
                array = self.arrays[inner].copy()
                return array if kind == "array" else array[()]
            case "layer", int():
                if inner not in self._layers:
                    self._layers[inner] = make_layer(self.configs[inner], f"layers.{inner}")
                return self._layers[inner]
            case "registered", str():
                return self._registered(inner)
            case "object", dict():
                return self._object(**inner)
        raise ValueError(f"a value is described by {kind!r}: {inner!r}")

    def _object(self, type: str, fields: dict[str, Any]) -> Any:
        cls = self._registered(type)
        if not _can_hold(cls):
            raise TypeError(f"{type} is no class of rewrites or vectors")
        _check_files(cls, fields, type)
        values = {name: self.value(value) for name, value in fields.items()}
        try:
            return cls.from_config(values)
        except SurgeryError as error:
            raise RecipeError(
                f"load_recipe at '{type}': expected fields that it takes. Received others: {error} "
                "The recipe is damaged or was changed; get it again."
            ) from error

    def _registered(self, name: str) -> Any:
        registered = keras.saving.get_registered_object(name)
        if registered is None:
            objects = keras.saving.get_custom_objects().items()
            known = (n for n, c in objects if isinstance(c, type) and issubclass(c, Rewrite))
            raise RecipeError(
                "load_recipe: expected a class or function that this process has registered. "
                f"Received '{name[:80]}'. {closest(name, known)} Import the module that does."
            )
        return registered


def _registered(value: Any) -> bool:
    name = keras.saving.get_registered_name(value)
    return keras.saving.get_registered_object(name) is value


def _can_hold(cls: Any) -> bool:
    """Tell whether a recipe can hold objects of a class by their fields."""
    fits = isinstance(cls, type) and hasattr(cls, "get_config") and hasattr(cls, "from_config")
    return fits and not issubclass(cls, (keras.layers.Layer, *REFUSED)) and _registered(cls)


def _check_files(cls: type, fields: Mapping[str, Any], where: str) -> None:
    """Check that a recipe names no file outside of it."""
    for name in getattr(cls, "files", ()):
        if fields.get(name):
            raise RecipeError(
                f"recipe at '{where}': expected no path in the field '{name}'. Received one, and a "
                "recipe never reads a file outside of it. Save a model that the rewrite was "
                "applied to."
            )


def _no_description(where: str, value: Any) -> SurgeryError:
    shown = getattr(value, "__name__", type(value).__name__)
    return SurgeryError(
        f"save_recipe at '{where}': expected numbers, strings, arrays, layers, classes and "
        f"functions registered by {_REGISTER}, or lists and dicts of these. Received '{shown}' of "
        f"type {type(value).__name__}, which has no description. {_INSTEAD}"
    )
