"""What a picture of a model shows: nodes, frames and arrows, read off its graph.

A node is one layer call. Sites, which compute nothing, are left out: arrows go past them, and past
the inputs of nested models. The arrays of one cache entry, such as key and value, are one node.
Nothing is added to the graph that is read.
"""

from dataclasses import dataclass, field
from typing import Any

import keras
import keras_hub
from keras import tree

from backbone_surgery import graph
from backbone_surgery.caching.stateful import WithState
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.site import Identity
from backbone_surgery.opening.state import Stateful

KINDS = ("input", "output", "cache", "stateful", "block", "inserted", "layer")
"""What a node can be. It decides the colour."""


@dataclass(frozen=True)
class Node:
    """One layer call, or one input or output of the model.

    Attributes:
        name: name of the layer, input or output.
        description: class of the layer; of a cache entry, the names of its arrays.
        kind: one of `KINDS`.
        shapes: dtype and shape of each tensor that it gives.
        frame: index of the frame that it is in; `None` outside of all.
    """

    name: str
    description: str
    kind: str
    shapes: tuple[str, ...]
    frame: int | None = None


@dataclass(frozen=True)
class Frame:
    """A nested model of which the inside is shown.

    Attributes:
        name: name of the nested model.
        parent: index of the frame around it; `None` for none.
    """

    name: str
    parent: int | None = None


@dataclass
class Picture:
    """Nodes, frames and arrows.

    Attributes:
        nodes: in the order in which they run.
        frames: the nested models, where they are expanded.
        edges: pairs of indices of nodes, each once, in order.
    """

    nodes: list[Node] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


def make_picture(model: keras.Model, expand_nested: bool) -> Picture:
    """Read the picture of a Functional model, with nested models framed or as one node each."""
    edited = getattr(model, "source", model)  # of a cached graph
    added = getattr(edited, "added_layers", frozenset()) | _put_in_by_hand(edited)
    return _Reader(expand_nested, added).read(model)


def _put_in_by_hand(edited: keras.Model) -> set[Any]:
    """Return the layers of no class of Keras, in a graph cloned from a KerasHub backbone."""
    if not isinstance(edited, EditedBackbone) or not _is_upstream(edited.family.block):
        return set()
    if isinstance(edited.owner, keras_hub.models.Backbone):
        return set()
    layers = [node.operation for node in graph.all_nodes(edited.owner)]
    return {layer for layer in layers if not _is_upstream(type(layer))}


def _is_upstream(kind: type) -> bool:
    return kind.__module__.startswith(("keras.", "keras_hub."))


class _Reader:
    """One walk over a graph. `sources` says which node gives each tensor, by its id."""

    def __init__(self, expand_nested: bool, added_layers: frozenset) -> None:
        self.expand_nested, self.added_layers = expand_nested, added_layers
        self.picture = Picture()
        self.sources: dict[int, int] = {}
        self.entries: dict[int, Node] = {}

    def read(self, model: keras.Model) -> Picture:
        nodes = graph.graph_nodes(model)  # refuses what is no graph
        model = graph.as_functional(model) or model  # of a Sequential
        inputs = model.input if isinstance(model.input, dict) else {}
        outputs = model.output if isinstance(model.output, dict) else {"": model.output}
        for i, entry in enumerate(inputs.get("cache", [])):
            node = _cache_node(f"cache_{i}", entry)
            self.entries.update({id(tensor): node for tensor in entry.values()})
        self._walk(nodes, None)
        for name, value in outputs.items():
            if name != "cache":
                self._add_outputs(name, value)
        for i, entry in enumerate(outputs.get("cache", [])):
            self._add(_cache_node(f"cache_{i}_updated", entry), list(entry.values()))
        return self.picture

    def _walk(self, nodes: list[Any], frame: int | None) -> None:
        for node in nodes:
            nested = graph.as_functional(node.operation)
            if node.is_input:
                self._add_input(node)
            elif isinstance(node.operation, Identity):
                self._pass_on(node.input_tensors, node.outputs)
            elif nested is not None and self.expand_nested:
                self._enter(node, nested, frame)
            else:
                kind = self._kind(node.operation)
                self._add(_node(node.operation, kind, node.outputs, frame), node.input_tensors)
                self._give(node.outputs)

    def _kind(self, layer: Any) -> str:
        if graph.as_functional(layer) is not None:
            return "block"
        layer = _without_state(layer)
        module = type(layer).__module__
        is_own = module.startswith("backbone_surgery.") and ".rewriting" not in module
        if ".rewriting" in module or (layer in self.added_layers and not is_own):
            return "inserted"
        return "stateful" if isinstance(layer, Stateful) else "layer"

    def _enter(self, node: Any, nested: keras.Model, frame: int | None) -> None:
        call = node.arguments
        structure = call.args[0] if call.args else call.kwargs["inputs"]
        self._pass_on(graph.in_order(nested, structure), nested.inputs)
        self.picture.frames.append(Frame(node.operation.name, frame))
        self._walk(graph.graph_nodes(nested), len(self.picture.frames) - 1)
        self._pass_on(nested.outputs, node.outputs)

    def _pass_on(self, old: list[Any], new: list[Any]) -> None:
        """Let each new tensor have the source of the old one."""
        sources = [self.sources.get(id(tensor)) for tensor in old]
        self.sources.update({id(t): s for t, s in zip(new, sources, strict=True) if s is not None})

    def _add_input(self, node: Any) -> None:
        """Add an input of the model; the arrays of one cache entry share a node."""
        tensor = node.outputs[0]
        entry = self.entries.get(id(tensor))
        if entry is not None and entry in self.picture.nodes:
            self.sources[id(tensor)] = self.picture.nodes.index(entry)
        elif id(tensor) not in self.sources:  # else an input of a nested model
            self._add(entry or _node(node.operation, "input", [tensor], None), [])
            self._give([tensor])

    def _add_outputs(self, name: str, value: Any) -> None:
        for path, tensor in tree.flatten_with_path(value):
            parts = [part for part in (name, *map(str, path)) if part]
            label = "_".join([*parts, "output"])
            self._add(Node(label, "Output", "output", _shapes([tensor])), [tensor])

    def _add(self, node: Node, inputs: list[Any]) -> None:
        self.picture.nodes.append(node)
        target = len(self.picture.nodes) - 1
        sources = dict.fromkeys(self.sources[id(t)] for t in inputs)
        self.picture.edges += [(source, target) for source in sources]

    def _give(self, tensors: list[Any]) -> None:
        """Say that these tensors come from the node that was added last."""
        self.sources.update({id(t): len(self.picture.nodes) - 1 for t in tensors})


def _node(layer: Any, kind: str, outputs: list[Any], frame: int | None) -> Node:
    return Node(layer.name, type(_without_state(layer)).__name__, kind, _shapes(outputs), frame)


def _without_state(layer: Any) -> Any:
    """Return the layer itself, of one that runs with its state as a node of a cached graph."""
    return layer.layer if isinstance(layer, WithState) else layer


def _cache_node(name: str, entry: dict[str, Any]) -> Node:
    return Node(name, ", ".join(entry), "cache", _shapes(entry.values()))


def _shapes(tensors: Any) -> tuple[str, ...]:
    """Write shapes as `float32[?, ?, 768]`, each once."""
    texts = (
        f"{t.dtype}[{', '.join('?' if n is None else str(n) for n in t.shape)}]" for t in tensors
    )
    return tuple(dict.fromkeys(texts))
