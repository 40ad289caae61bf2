"""Shared layers: a graph that is built over them is freed with its last user.

Each call of a layer on symbolic tensors adds a node to the layer, and Keras keeps the nodes of a
layer as long as the layer lives. The layers of a backbone are in every graph that is made from it,
so each of these graphs would stay in memory for good.

Therefore a shared layer keeps its nodes in `SharedNodes`. A node that is added while a graph is
built (`building`) is held by its output tensors, and the layer refers to it weakly. Whoever holds a
tensor of a graph, or a model of it, thereby holds all nodes above. A node that a user adds by
calling the layer stays with the layer, as in Keras.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
from keras.src.ops.node import Node

from backbone_surgery.graph.building import is_building
from backbone_surgery.graph.keras_private import layers_within

NODES = ("_inbound_nodes", "_outbound_nodes")
"""The attributes in which Keras lists the nodes of a layer, and those that use its outputs."""


def share(operation: keras.Operation) -> None:
    """Refer weakly to the graphs that will be built over a layer, a model or an operation.

    Args:
        operation: it, with all that is in it. The nodes that it has by now stay with it.
    """
    if is_shared(operation):
        return
    layers = layers_within(operation) if isinstance(operation, keras.Layer) else [operation]
    for layer in layers:
        for part in (layer, *getattr(layer, "operations", ())):
            if not is_shared(part):
                # Not by `setattr`, with which Keras would track the nodes as parts of the layer.
                vars(part).update({name: SharedNodes(getattr(part, name)) for name in NODES})


def is_shared(operation: keras.Operation) -> bool:
    """Tell whether `share` was called for an operation."""
    return isinstance(operation._inbound_nodes, SharedNodes)


class SharedNodes(Sequence):
    """The nodes of a layer that several graphs share, where Keras would have a list.

    Keras finds a node by its number, so a node keeps its number as long as it lives. When it is
    gone, a node of no graph takes its place, for as long as a living node comes after it.

    Args:
        nodes: those that stay with the layer.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._own: list[Node] = list(nodes)
        self._places: list[_Place | Node] = []
        for node in self._own:
            self._places.append(self._place(node))

    def append(self, node: Node) -> None:
        """Add a node: to stay with its tensors if a graph is being built, else with the layer."""
        del self._places[len(self) :]
        if is_building():
            for tensor in node.outputs:
                tensor.made_by = node
        else:
            self._own.append(node)
        self._places.append(self._place(node))

    def index(self, node: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the number of a node. Keras mostly asks for one of the last."""
        for index in reversed(range(len(self))[start:stop]):
            if self[index] is node:
                return index
        raise ValueError(f"{node!r} is not among these nodes")

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        if isinstance(index, slice):
            return [self[number] for number in numbers]
        place = self._places[numbers]
        return (place() or place.gone) if isinstance(place, _Place) else place

    def __len__(self) -> int:
        length = len(self._places)
        while length and not isinstance(self._places[length - 1], _Place):
            length -= 1
        return length

    def _place(self, node: Node) -> "_Place":
        place = _Place(node, self._clear)
        place.number = len(self._places)
        # Keras counts the outputs of a layer by its first node, whichever graph that belongs to.
        place.gone = _gone(tuple((tensor.shape, tensor.dtype) for tensor in node.outputs))
        return place

    def _clear(self, place: "_Place") -> None:
        self._places[place.number] = place.gone


class _Place(weakref.ref):
    """Where a node is: its number, and what stands there when it is gone."""

    __slots__ = ("gone", "number")
    gone: Node
    number: int


@functools.lru_cache(maxsize=4096)
def _gone(outputs: tuple[tuple[tuple, str], ...]) -> Node:
    """Return a node of no graph, with outputs of these shapes and dtypes."""
    nobody = SimpleNamespace(name="gone", _inbound_nodes=[])
    tensors = [keras.KerasTensor(shape, dtype) for shape, dtype in outputs]
    return Node(nobody, call_args=(), call_kwargs={}, outputs=tensors)
