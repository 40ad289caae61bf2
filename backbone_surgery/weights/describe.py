"""Rewrites as JSON and back: what is in their fields, with arrays and layers kept aside.

A rewrite is a frozen dataclass, so its fields say all there is to say about it. Numbers, strings,
lists, tuples and dicts become JSON; arrays go into a file of arrays under the path of their field,
with the items of dicts numbered; a layer becomes its config, and a class or function the name under
which it is registered. Any other function has no description, and nothing here ever runs code that
came from a file.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import keras
import numpy as np

from backbone_surgery.errors import RecipeError, SurgeryError, closest
from backbone_surgery.rewrites import Rewrite
from backbone_surgery.vectors.vector import ControlVector
from backbone_surgery.weights.arrays import NAMES, Array, held
from backbone_surgery.weights.configs import layer_config, make_layer, unnamed

_OWN = "backbone_surgery"
_DEPTH = 40
_INSTEAD = (
    "Use Insert, Replace or Wrap to put a layer somewhere, Skip, Remove, Repeat or Reorder to "
    "change the order of blocks, Steer, Patch or Ablate to change what flows between them, or "
    "write a `SiteRewrite` and register it with `register_rewrite`."
)
_registered: dict[str, type[Rewrite]] = {}

Class = TypeVar("Class", bound=type)


def register_rewrite(cls: Class | None = None, *, package: str = "custom") -> Any:
    """Register a rewrite class of your own, so that recipes can hold it. A decorator.

    A recipe names the class, and holds its fields; the process that loads it must have registered
    the class too.

    Args:
        cls: a `Rewrite` that is a frozen dataclass.
        package: what tells it from a class of the same name elsewhere.

    Returns:
        The class as it is, or a decorator where only `package` was given.

    Raises:
        SurgeryError: it is no such class.

    Example:
        >>> import dataclasses, backbone_surgery as bs
        >>> @bs.register_rewrite(package="my_lab")
        ... @dataclasses.dataclass(frozen=True)
        ... class Double(bs.SiteRewrite):
        ...     at: str = "blocks.*.mlp_output"
        ...
        ...     def apply(self, x, place, surgery):
        ...         return x + x
    """
    if cls is None:
        return lambda given: register_rewrite(given, package=package)
    frozen = dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not (isinstance(cls, type) and issubclass(cls, Rewrite) and frozen):
        raise SurgeryError(
            f"register_rewrite at '{getattr(cls, '__name__', cls)}': expected a `Rewrite` that is "
            "a frozen dataclass. Received something else. Put `@dataclass(frozen=True)` on it."
        )
    _registered[f"{package}>{cls.__name__}"] = cls
    return cls


def known_rewrites() -> dict[str, type[Rewrite]]:
    """Return the rewrite classes that a recipe can name, by those names."""
    found: dict[str, type[Rewrite]] = {}
    waiting: list[type[Rewrite]] = Rewrite.__subclasses__()
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if cls.__module__.startswith(f"{_OWN}.") and hasattr(cls, "__dataclass_fields__"):
            found[f"{_OWN}>{cls.__name__}"] = cls
    return {**found, **_registered}


class Describer:
    """Turns rewrites into JSON, and collects their arrays and layers.

    Attributes:
        arrays: what the fields hold, by path.
        layers: config of each layer in them, once.
    """

    def __init__(self, owned: set[int]) -> None:
        self.owned = owned
        self.arrays: dict[str, Array] = {}
        self.layers: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._described: list[tuple[keras.layers.Layer, str]] = []

    def check_kept(self, variables: Iterable[keras.Variable]) -> None:
        """Check that all weights of the layers are among the variables that a recipe keeps."""
        kept = {id(v) for v in variables}
        holders: dict[int, str] = {}
        for layer, where in self._described:
            for held_by in {holders.setdefault(id(v), where) for v in layer.weights} - {where}:
                raise SurgeryError(
                    f"save_recipe at '{where}': expected layers that share no weights. Received "
                    f"'{layer.name}', with weights of the layer at '{held_by}'. Use one layer in "
                    "both places."
                )
            if any(id(v) not in kept for v in layer.weights):
                raise SurgeryError(
                    f"save_recipe at '{where}': expected a layer that runs in the edited graph, "
                    f"whose weights a recipe keeps. Received '{layer.name}', which has weights and "
                    "does not run there. Leave out the rewrite that holds it, or hold an unbuilt "
                    "layer, or its weights as arrays."
                )

    def rewrite(self, rewrite: Any, where: str) -> dict[str, Any]:
        """Describe one rewrite; `where` is its path, such as `rewrites.0`."""
        if not isinstance(rewrite, Rewrite):
            name = getattr(rewrite, "__name__", type(rewrite).__name__)
            raise SurgeryError(
                f"save_recipe at '{where}': expected rewrites, which describe themselves. Received "
                f"the function '{name}', which does not. {_INSTEAD}"
            )
        names = {cls: name for name, cls in known_rewrites().items()}
        kind = type(rewrite)
        if kind not in names:
            raise SurgeryError(
                f"save_recipe at '{where}': expected a rewrite of a registered class. Received a "
                f"{kind.__name__}. Decorate the class with `register_rewrite`, and make it a "
                "frozen dataclass."
            )
        fields = [f for f in dataclasses.fields(kind) if f.init]  # type: ignore[arg-type]
        described = {f.name: getattr(rewrite, f.name) for f in fields}
        _check_files(kind, described, f"save_recipe at '{where}'", SurgeryError)
        return {
            "type": names[kind],
            "fields": {n: self.value(v, f"{where}.{n}") for n, v in described.items()},
        }

    def value(self, value: Any, where: str) -> Any:
        """Describe what is in a field."""
        if where.count(".") > _DEPTH:
            raise SurgeryError(
                f"save_recipe at '{where[:40]}': expected values nested at most {_DEPTH} deep. "
                "Received deeper ones. Nest less."
            )
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float) and not isinstance(value, np.generic):
            return self._number(value, where)
        if isinstance(value, Mapping):
            items = enumerate(value.items())
            return {"dict": [self._item(k, v, f"{where}.{i}") for i, (k, v) in items]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.value(v, f"{where}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Rewrite):
            return {"rewrite": self.rewrite(value, where)}
        if isinstance(value, keras.layers.Layer):
            return {"layer": self._layer(value, where)}
        if isinstance(value, ControlVector):
            return self.value(value.directions, where)
        if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
            value = keras.ops.convert_to_numpy(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype in NAMES:
            self.arrays[where] = held(value)
            return {"scalar" if isinstance(value, np.generic) else "array": where}
        if isinstance(value, type | FunctionType):
            name = keras.saving.get_registered_name(value)
            if keras.saving.get_registered_object(name) is value:
                return {"registered": name}
        raise _no_description(where, value)

    def _number(self, value: float, where: str) -> float:
        if not math.isfinite(value):
            raise SurgeryError(
                f"save_recipe at '{where}': expected a finite number. Received {value}. Change the "
                "rewrite."
            )
        return value

    def _item(self, key: Any, value: Any, where: str) -> list[Any]:
        key = int(key) if isinstance(key, np.integer) else key
        if type(key) not in (int, str):
            raise _no_description(where, key)
        return [key, self.value(value, where)]

    def _layer(self, layer: keras.layers.Layer, where: str) -> int:
        """Describe a layer by its config, once, and return its number."""
        if id(layer) not in self._numbers:
            if any(id(v) in self.owned for v in layer.weights):
                raise SurgeryError(
                    f"save_recipe at '{where}': expected a layer of the rewrite's own. Received "
                    f"'{layer.name}', a layer of the backbone. Name its place by a site or a block."
                )
            self._numbers[id(layer)] = len(self.layers)
            self._described.append((layer, where))
            self.layers.append(layer_config(layer, where))
        return self._numbers[id(layer)]


class Rebuilder:
    """Turns JSON back into rewrites.

    Attributes:
        used: paths of the arrays that were asked for.
    """

    def __init__(self, arrays: Mapping[str, Array], configs: list[dict[str, Any]]) -> None:
        self.arrays, self.configs = arrays, configs
        self.used: set[str] = set()
        self._made: dict[int, keras.layers.Layer] = {}
        self._known = known_rewrites()

    def check(self, description: dict[str, Any], where: str) -> None:
        """Check that a rewrite can be rebuilt, before anything is."""
        kind, fields = description["type"], description["fields"]
        if kind not in self._known:
            raise RecipeError(
                f"load_recipe at '{where}': expected a rewrite that this process knows. Received "
                f"'{kind[:80]}'. {closest(kind, self._known)} Import the module that registers it."
            )
        own = [f for f in dataclasses.fields(self._known[kind]) if f.init]  # type: ignore[arg-type]
        required = {f.name for f in own if f.default is f.default_factory is dataclasses.MISSING}
        if not required <= set(fields) <= {f.name for f in own}:
            raise RecipeError(
                f"load_recipe at '{where}': expected fields of {kind}: "
                f"{', '.join(f.name for f in own)}. Received {', '.join(fields)[:200]}. The recipe "
                "was made by another release of that class."
            )
        _check_files(self._known[kind], fields, f"load_recipe at '{where}'", RecipeError)
        for name, value in fields.items():
            self._check_value(value, f"{where}.{name}")

    def _check_value(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            return
        (kind, inner), *_ = value.items()
        if kind in ("array", "scalar"):
            if inner not in self.arrays or (kind == "scalar" and self.arrays[inner].shape):
                raise _no_such(where, f"the array '{inner[:80]}'")
            if inner in self.used:
                raise RecipeError(
                    f"load_recipe at '{where}': expected an array that nothing else holds. "
                    f"Received '{inner[:80]}' once more. The recipe is damaged; get it again."
                )
            self.used.add(inner)
        elif kind == "layer":
            if inner >= len(self.configs):
                raise _no_such(where, f"layer {inner}")
        elif kind == "registered":
            if keras.saving.get_registered_object(inner) is None:
                raise RecipeError(
                    f"load_recipe at '{where}': expected a class or function that this process has "
                    f"registered. Received '{inner[:80]}'. Import the module that registers it."
                )
        elif kind == "rewrite":
            self.check(inner, where)
        else:
            if kind == "dict" and len({key for key, _ in inner}) < len(inner):
                raise RecipeError(
                    f"load_recipe at '{where}': expected a dict of different keys. Received one "
                    "with a key given twice. The recipe is damaged; get it again."
                )
            for item in inner:
                self._check_value(item[1] if kind == "dict" else item, where)

    def rewrite(self, description: dict[str, Any], where: str) -> Rewrite:
        """Rebuild one rewrite, which was checked before."""
        kind = self._known[description["type"]]
        fields = {name: self.value(value) for name, value in description["fields"].items()}
        try:
            return kind(**fields)
        except SurgeryError:
            raise
        except Exception as error:
            raise RecipeError(
                f"load_recipe at '{where}': expected fields that {kind.__name__} takes. Received "
                f"some where {str(error)[:200]}. The recipe was made by another release of it."
            ) from error

    def value(self, value: Any) -> Any:
        """Rebuild what was in a field."""
        if not isinstance(value, dict):
            return value
        (kind, inner), *_ = value.items()
        make: dict[str, Callable[[], Any]] = {
            "list": lambda: [self.value(v) for v in inner],
            "tuple": lambda: tuple(self.value(v) for v in inner),
            "dict": lambda: {key: self.value(v) for key, v in inner},
            "array": lambda: self.arrays[inner].read().copy(),
            "scalar": lambda: self.arrays[inner].read()[()],
            "layer": lambda: self._layer(inner),
            "registered": lambda: keras.saving.get_registered_object(inner),
            "rewrite": lambda: self.rewrite(inner, inner["type"]),
        }
        return make[kind]()

    def _layer(self, number: int) -> keras.layers.Layer:
        if number not in self._made:
            config = unnamed(self.configs[number])
            self._made[number] = make_layer(config, f"layers.{number}")
        return self._made[number]


def _check_files(
    kind: type[Rewrite], fields: Mapping[str, Any], where: str, error: type[SurgeryError]
) -> None:
    """Check that a recipe names no file outside of it."""
    for name in kind.files:
        if fields.get(name):
            raise error(
                f"{where}: expected no path in the field '{name}'. Received one, and a recipe "
                "never reads a file outside of it. Save a model that the rewrite was applied to."
            )


def _no_such(where: str, what: str) -> RecipeError:
    return RecipeError(
        f"load_recipe at '{where}': expected {what} in the recipe. Received a recipe without it. "
        "It is damaged; get it again."
    )


def _no_description(where: str, value: Any) -> SurgeryError:
    shown = getattr(value, "__name__", type(value).__name__)
    return SurgeryError(
        f"save_recipe at '{where}': expected numbers, strings, arrays, layers, classes and "
        "functions registered by `keras.saving.register_keras_serializable`, or lists and dicts of "
        f"these. Received '{shown}' of type {type(value).__name__}, which has no description. "
        f"{_INSTEAD}"
    )
