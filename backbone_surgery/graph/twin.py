"""Twins: other objects over the very same state as a layer, with something else inside.

A twin has no attributes of its own: its `__dict__` is that of the layer, so whatever happens to the
layer later, such as LoRA or quantisation, happens to the twin. What differs is its class, a
subclass of the layer's. A property in a class goes before an attribute of the same name, so a twin
can show another sub-layer where the layer shows its own, and nothing is set on the layer. Only what
a call leaves behind, nodes and losses, each has for itself.
"""

import types
from collections.abc import Callable, Container
from typing import Any

import keras

from backbone_surgery.errors import SurgeryError
from backbone_surgery.graph import keras_private
from backbone_surgery.graph.nodes import as_functional
from backbone_surgery.graph.shared_nodes import SharedNodes

LEFT_BY_CALLS: dict[str, type] = {
    "_inbound_nodes": SharedNodes,
    "_outbound_nodes": SharedNodes,
    "_losses": list,
    "_loss_ids": set,
}
"""The attributes in which calls leave nodes and losses on a layer, and what each is."""


class Twin:
    """Base of all twins."""

    name: str

    def diverted(self) -> tuple | None:
        """Return what a twin made by `divert` was made of. A method: Keras saves attributes."""
        return None

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the call: what the layer itself says may no longer hold."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)

    def get_config(self) -> dict:
        """Refuse: a config would bring back the layer as it was."""
        raise SurgeryError(
            f"get_config at '{self.name}': expected a layer that can be rebuilt "
            "from a config. Received one that was rewritten inside. Save the weights with "
            "`save_weights`, and rewrite a new model before loading them."
        )


def twin(layer: keras.Layer, swaps: dict[int, keras.Layer]) -> keras.Layer:
    """Make a twin of a layer that has other layers in place of some of its own.

    Args:
        layer: what to make a twin of. It is not changed.
        swaps: `{id(sub-layer): what takes its place}`, wherever an attribute holds it, also inside
            lists, dicts, tuples and sets, or a nested model calls it.

    Returns:
        A layer that shares all state with `layer`.
    """
    if isinstance(layer, Twin) and (made_of := layer.diverted()):
        below, run, brought_in = made_of
        return divert(twin(below, swaps), run, brought_in)
    functional = as_functional(layer)
    if functional is not None and functional is not layer:
        swaps = {**swaps, id(functional): twin(functional, swaps)}

    def shown(name: str) -> property:
        return property(lambda _: _swap(getattr(layer, name), swaps))

    names = [name for name, value in _held(layer).items() if _holds(value, swaps)]
    members = {name: shown(name) for name in names}
    return _make(layer, {**members, **keras_private.members_running(layer, swaps)})


def divert(
    layer: keras.Layer, run: Callable[..., Any], brought_in: list[keras.Layer]
) -> keras.Layer:
    """Make a twin of a layer whose calls run another function.

    Args:
        layer: what to make a twin of. It is not changed.
        run: called in place of the layer, with the layer and the arguments of the call.
        brought_in: layers that `run` uses; Keras will find them inside the twin. May grow later.

    Returns:
        A layer that shares all state with `layer`.
    """

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return run(layer, *args, **kwargs)

    members: dict[str, Any] = {
        "__call__": call,
        "call": call,
        "diverted": lambda _: (layer, run, brought_in),
        "brought_in": property(lambda _: brought_in),
        # The layer itself, which is inside, lists them.
        "metrics": property(lambda _: []),
        **keras_private.members_tracking(lambda: [layer, *brought_in]),
    }
    if hasattr(layer, "layers"):
        members["layers"] = property(lambda _: layer.layers)
    return _make(layer, members)


def inside(layer: keras.Layer) -> tuple[list[keras.Layer], dict[str, Any]]:
    """Return the layers that a layer is made of, and its attributes, as a twin of it shows them."""
    if isinstance(layer, Twin) and (made_of := layer.diverted()):
        return inside(made_of[0])
    lists = keras_private.LISTS_OF_LAYERS
    attributes = {name: value for name, value in _held(layer).items() if name not in lists}
    return keras_private.sublayers(layer), attributes


def _make(layer: keras.Layer, members: dict[str, Any]) -> keras.Layer:
    own = {name: kind() for name, kind in LEFT_BY_CALLS.items()}

    def kept(name: str) -> property:
        return property(lambda _: own[name])

    kind = type(layer)
    bases = (kind,) if issubclass(kind, Twin) else (Twin, kind)
    namespace = {"__module__": kind.__module__, **{name: kept(name) for name in own}, **members}
    subclass = types.new_class(kind.__name__, bases, {}, lambda body: body.update(namespace))
    result: Any = object.__new__(subclass)
    object.__setattr__(result, "__dict__", vars(layer))
    return result


def _held(layer: keras.Layer) -> dict[str, Any]:
    # On the torch backend layers are torch modules, which keep sub-modules apart.
    names = [*vars(layer), *vars(layer).get("_modules", ())]
    return {name: getattr(layer, name) for name in names}


def _holds(value: Any, swaps: Container[int]) -> bool:
    if isinstance(value, dict | list | tuple | set) and id(value) not in swaps:
        items = value.values() if isinstance(value, dict) else value
        return any(_holds(item, swaps) for item in items)
    return id(value) in swaps


def _swap(value: Any, swaps: dict[int, Any]) -> Any:
    if not _holds(value, swaps):
        return value
    if isinstance(value, dict):
        return {key: _swap(item, swaps) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        items = [_swap(item, swaps) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return next(kind for kind in (list, tuple, set) if isinstance(value, kind))(items)
    return swaps[id(value)]
