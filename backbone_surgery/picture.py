"""The graph as it is to be looked at: what `plotting` and `mermaid` draw.

It is a clone of the graph in which the sites, which compute nothing, are left out, the key and
value of one cache are one node, and every output has a node of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import tree

from backbone_surgery import graph
from backbone_surgery.site import Identity

_OWN = ("keras.src", "keras_hub", "backbone_surgery")


class Output(keras.layers.Layer):
    """Stand for an output of the model, or for the key and value of one cache."""

    def call(self, inputs):
        """Return the input."""
        return inputs

    def compute_output_spec(self, inputs):
        """Keep shape and dtype."""
        first = tree.flatten(inputs)[0]
        return keras.KerasTensor(first.shape, first.dtype)


@dataclass
class Picture:
    """Nodes, frames and arrows.

    Attributes:
        model: the clone that is drawn.
        nodes: the layers outside of any frame, by `id`.
        frames: for each nested model, its name and its nodes; empty unless expanded.
        edges: pairs of ids of layers, in order, each once.
    """

    model: keras.Model
    nodes: dict[int, Any] = field(default_factory=dict)
    frames: list[tuple[keras.Model, dict[int, Any]]] = field(default_factory=list)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)


def make_picture(model: keras.Model, expand_nested: bool) -> Picture:
    """Make the picture of a Functional model, nested models framed or as one node each."""
    clone = _clone(model)
    picture = Picture(clone)
    _walk(clone, expand_nested, picture, picture.nodes, {})
    return picture


def kind(layer: Any) -> str:
    """Tell what a node is: one of the keys of `COLOURS`."""
    if layer.name.startswith("cache_") and isinstance(layer, keras.layers.InputLayer | Output):
        return "input" if layer.name in ("cache_mask", "cache_update_index") else "cache"
    if isinstance(layer, keras.layers.InputLayer):
        return "input"
    if isinstance(layer, Output):
        return "output"
    if isinstance(layer, keras.Model):
        return "block"
    module = type(layer).__module__
    if "Attention" in type(layer).__name__ and module.startswith(_OWN):
        return "attention"
    if not module.startswith(_OWN) or ".rewrites" in module:
        return "inserted"
    return "layer"


def _clone(model: keras.Model) -> keras.Model:
    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if isinstance(layer, Identity) else graph.KEEP

    mapping = {id(t): t for t in tree.flatten(model.input)}
    caches = model.input.get("cache", []) if isinstance(model.input, dict) else []
    for i, pair in enumerate(caches):
        key = pair["key"]
        merged = keras.Input(key.shape[1:], dtype=key.dtype, name=f"cache_{i}")
        mapping.update({id(t): merged for t in pair.values()})
    shown = list({id(t): t for t in mapping.values()}.values())
    outputs, _ = graph.replay(model.output, mapping, visit, per_use=True)
    named = _named_outputs(outputs)
    used = {id(t) for node in graph.topological_nodes(named) for t in node.outputs}
    return keras.Model([t for t in shown if id(t) in used], named, name=model.name)


def _named_outputs(outputs: Any) -> list[keras.KerasTensor]:
    """Put a node at each output; the key and value of one cache share one."""
    if isinstance(outputs, dict):
        caches = outputs.get("cache", [])
        rest = {name: value for name, value in outputs.items() if name != "cache"}
        pairs = [Output(name=f"cache_{i}_updated")(list(p.values())) for i, p in enumerate(caches)]
    else:
        rest, pairs = outputs, []
    flat = tree.flatten_with_path(rest)
    names = ["_".join(str(p) for p in path) or "output" for path, _ in flat]
    return [Output(name=f"{n}_output")(t) for n, (_, t) in zip(names, flat, strict=True)] + pairs


def _walk(
    model: keras.Model,
    expand: bool,
    picture: Picture,
    nodes: dict[int, Any],
    sources: dict[int, int],
) -> None:
    """Add a model to the picture. `sources` says which layer made each tensor, by ids."""
    for node in graph.graph_nodes(model):
        layer = node.operation
        nested = graph.as_functional(layer)
        made = [sources[id(t)] for t in node.input_tensors]
        if nested is not None and expand:
            inner: dict[int, Any] = {}
            picture.frames.append((layer, inner))
            known = {id(t): s for t, s in zip(nested.inputs, made, strict=True)}
            _walk(nested, expand, picture, inner, known)
            found = [known[id(t)] for t in nested.outputs]
            sources.update({id(t): s for t, s in zip(node.outputs, found, strict=True)})
        elif node.is_input and id(node.outputs[0]) in sources:
            continue  # an input of a nested model: arrows go through it
        else:
            nodes[id(layer)] = layer
            picture.edges.update({(source, id(layer)): None for source in made})
            sources.update({id(t): id(layer) for t in node.outputs})


def mermaid_lines(picture: Picture) -> Iterator[str]:
    """Write a picture as the lines of a Mermaid flowchart."""
    everything = [
        *picture.nodes.values(),
        *(n for _, inner in picture.frames for n in inner.values()),
    ]
    short = {id(layer): f"n{i}" for i, layer in enumerate(everything)}
    yield "flowchart TD"
    for layer in picture.nodes.values():
        yield f"    {_mermaid_node(short, layer)}"
    for i, (model, inner) in enumerate(picture.frames):
        yield f'    subgraph s{i}["{model.name}"]'
        yield from (f"        {_mermaid_node(short, layer)}" for layer in inner.values())
        yield "    end"
    for source, target in picture.edges:
        yield f"    {short[source]} --> {short[target]}"
    for name, style in _MERMAID_STYLES.items():
        members = [short[id(layer)] for layer in everything if kind(layer) == name]
        if members:
            yield f"    classDef {name} {style}"
            yield f"    class {','.join(members)} {name}"


COLOURS = {
    "input": "#57606a",
    "output": "#57606a",
    "cache": "#0969da",
    "attention": "#bc4c00",
    "block": "#24292f",
    "inserted": "#1a7f37",
    "layer": "#424a53",
}
_MERMAID_STYLES = {name: f"fill:{c},color:#fff,stroke:{c}" for name, c in COLOURS.items()}


def _mermaid_node(short: dict[int, str], layer: Any) -> str:
    brackets = ("([", "])") if kind(layer) in ("input", "output", "cache") else ("[", "]")
    return f'{short[id(layer)]}{brackets[0]}"{layer.name}<br/>{type(layer).__name__}"{brackets[1]}'
