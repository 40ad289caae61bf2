"""Paths: a stable name for each weight of a model, which does not depend on how it was made.

A path is the variable's own path in Keras with three changes. A weight of a decoder block begins
with `blocks.<number>`, whatever the block is called. A name that Keras made up and numbered for
the whole process (`dense_7`) is numbered anew within its scope (`dense`, `dense_1`), in the order
in which the layers were made. And an edited model names its weights as the owner of the weights
does, so that skipping, repeating or reordering blocks renames nothing; the layers that an edit put
in are named by where they stand, counted in the order in which they run.
"""

import re
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.backbone import BackboneWithCache, EditedBackbone
from backbone_surgery.errors import SurgeryError
from backbone_surgery.families import FAMILIES
from backbone_surgery.rewrites.wrap import BeforeBlock
from backbone_surgery.site import is_block

Parts = tuple[str, ...]
Rows = list[tuple[Parts, keras.Variable]]

_UNNAMED = re.compile(r"variable(_\d+)?")
"""The names that Keras makes up for weights."""


def resolve(model: Any) -> keras.Model:
    """Return the model whose weights are meant: a task's backbone, a cached graph's source.

    Raises:
        SurgeryError: it is no Keras model, or has no weights yet.
    """
    if isinstance(model, keras_hub.models.CausalLM):
        model = model.backbone
    if isinstance(model, BackboneWithCache):
        model = model.source
    if not isinstance(model, keras.Model) or not model.weights:
        received = "a model without weights" if isinstance(model, keras.Model) else repr(model)
        raise SurgeryError(
            f"weights: expected a built Keras model. Received {received} of type "
            f"{type(model).__name__}. Pass a backbone, what `operate` made of one, or a task."
        )
    return model


def owner_of(model: keras.Model) -> keras.Model:
    """Return the model that owns the weights of a graph: itself, unless it was opened from one."""
    return model.owner if isinstance(model, EditedBackbone) else model


def variable_paths(model: Any) -> dict[str, keras.Variable]:
    """Return each weight of a model once, by its path.

    Args:
        model: a Keras model, a causal LM task, or what `operate` or `rewire` made.

    Returns:
        `{path: variable}`, in the order of the model's own `weights`; those that an edit put in
        come last. A variable that several layers share is there once, under its own path.
    """
    model = resolve(model)
    owner = owner_of(model)
    paths = _named(_parts(owner))
    if model is not owner:
        paths.update(extra_paths(model, paths))
    return paths


def aliases(model: Any) -> dict[str, str]:
    """Return `{other path: path}` of the weights that a second layer of the model holds too."""
    owner = owner_of(resolve(model))
    own = {id(v): path for path, v in _named(_parts(owner)).items()}
    every = _named([*_parts(owner), *_holders(owner)], shared=True)
    return {path: own[id(v)] for path, v in every.items() if own[id(v)] != path}


def extra_paths(
    edited: EditedBackbone, owner_paths: dict[str, keras.Variable]
) -> dict[str, keras.Variable]:
    """Return the weights of an edited graph that its owner does not have, by path.

    They are counted in the order in which the graph runs, so that the same rewrites give the same
    paths in any process.
    """
    known = {id(v): path for path, v in owner_paths.items()}
    found: dict[str, keras.Variable] = {}
    taken: dict[Parts, int] = {}

    def walk(model: keras.Model, scope: Parts) -> None:
        for node in graph.graph_nodes(model):
            layer = node.operation
            nested = graph.as_functional(layer)
            if nested is not None:
                walk(nested, _block_scope(nested, known) or scope)
                continue
            new = [v for v in getattr(layer, "weights", ()) if id(v) not in known]
            if not new:
                continue
            name = (*scope, _stem(layer))
            count = taken[name] = taken.get(name, -1) + 1
            prefix = (*scope, f"{name[-1]}_{count}" if count else name[-1])
            for path, variable in _named(_inside(layer, new)).items():
                full = _join((*prefix, path))
                known[id(variable)] = full
                found[full] = variable

    walk(edited, ())
    return found


def is_lora(path: str) -> bool:
    """Tell whether a path is that of a LoRA factor."""
    return path.rpartition(".")[2].startswith("lora_")


def _block_scope(nested: keras.Model, known: dict[int, str]) -> Parts | None:
    """Return the scope of an opened block: the owner's block that its weights belong to."""
    if not is_block(nested):
        return None
    paths = (known.get(id(v), "") for v in nested.weights)
    for path in paths:
        if path.startswith("blocks."):
            return tuple(path.split(".")[:2])
    return None


def _parts(model: keras.Model) -> Rows:
    """Return each weight of a model with the parts of its path."""
    inside = {id(v): block for block in _blocks(model) for v in block.weights}
    return _addressed(model, [(inside.get(id(v)), v.path, v) for v in model.weights])


def _holders(model: keras.Model) -> Rows:
    """Return the path at which each layer holds a weight, where it is not the weight's own."""
    inside = {id(part): block for block in _blocks(model) for part in graph.layers_within(block)}
    found = []
    for layer in graph.layers_within(model):
        for variable in graph.own_weights(layer):
            place = f"{layer.path}/{variable.name}"
            if place != variable.path:
                found.append((inside.get(id(layer)), place, variable))
    return _addressed(model, found)


def _addressed(
    model: keras.Model, found: list[tuple[keras.Layer | None, str, keras.Variable]]
) -> Rows:
    """Split paths, number the blocks that they are in, and number made-up names anew."""
    numbers = _numbered(_blocks(model))
    scopes = [("blocks", str(numbers[block])) if block else () for block, _, _ in found]
    split = [_split(path, block or model) for block, path, _ in found]
    names = _renumbered(list(zip(scopes, split, strict=True)), _auto(model))
    variables = [variable for _, _, variable in found]
    return [((*s, *n), v) for s, n, v in zip(scopes, names, variables, strict=True)]


def _inside(layer: keras.Layer, variables: list[keras.Variable]) -> Rows:
    """Return weights of one layer with the parts of their paths inside of it."""
    rows: list[tuple[Parts, Parts]] = [((), _split(v.path, layer)) for v in variables]
    return list(zip(_renumbered(rows, _auto(layer)), variables, strict=True))


def _blocks(model: keras.Model) -> list[keras.Layer]:
    kinds = tuple(family.block for family in FAMILIES)
    return [layer for layer in graph.layers_within(model) if isinstance(layer, kinds)]


def _numbered(blocks: list[keras.Layer]) -> dict[keras.Layer, int]:
    """Number blocks: by their names where these are given numbers, else in the order made."""
    matches = [re.fullmatch(r"(.+)_(\d+)", block.name) for block in blocks]
    numbers = [int(m[2]) for m in matches if m]
    stems = {m[1] for m in matches if m}
    given = len(stems) == 1 and len(set(numbers)) == len(blocks)
    if given and not any(graph.is_auto_named(block) for block in blocks):
        return dict(zip(blocks, numbers, strict=True))
    made = sorted(blocks, key=lambda block: _suffix(block.name))
    return {block: number for number, block in enumerate(made)}


def _auto(model: keras.Layer) -> set[str]:
    """Return the names in a model that Keras made up."""
    return {layer.name for layer in graph.layers_within(model) if graph.is_auto_named(layer)}


def _split(path: str, outer: Any) -> Parts:
    """Split a variable's path, without the part that names what it is in."""
    for prefix in (outer.path, outer.name):
        if prefix and path.startswith(f"{prefix}/"):
            path = path.removeprefix(f"{prefix}/")
            break
    return tuple(part.replace(".", "_") for part in path.split("/"))


def _renumbered(rows: list[tuple[Parts, Parts]], auto: set[str]) -> list[Parts]:
    """Number the made-up names among the parts of paths anew, within their scopes."""
    seen: dict[tuple[Parts, str], set[str]] = {}
    for scope, parts in rows:
        for depth, part in enumerate(parts):
            made_up = part in auto if depth + 1 < len(parts) else _UNNAMED.fullmatch(part)
            if made_up:
                key = ((*scope, *parts[:depth]), re.sub(r"_\d+$", "", part))
                seen.setdefault(key, set()).add(part)
    new: dict[tuple[Parts, str], str] = {}
    for (scope, stem), names in seen.items():
        for count, name in enumerate(sorted(names, key=_suffix)):
            new[scope, name] = f"{stem}_{count}" if count else stem

    def rename(scope: Parts, parts: Parts) -> Parts:
        renamed = (
            new.get(((*scope, *parts[:depth]), part), part) for depth, part in enumerate(parts)
        )
        return tuple(renamed)

    return [rename(scope, parts) for scope, parts in rows]


def _named(rows: Rows, shared: bool = False) -> dict[str, keras.Variable]:
    """Join parts to paths; where two weights would have one path, the later ones are numbered."""
    paths: dict[str, keras.Variable] = {}
    for parts, variable in rows:
        path, count = _join(parts), 0
        while path in paths and not (shared and paths[path] is variable):
            count += 1
            path = f"{_join(parts)}#{count}"
        paths[path] = variable
    return paths


def _join(parts: Parts) -> str:
    return ".".join(parts)


def _stem(layer: keras.Layer) -> str:
    if isinstance(layer, BeforeBlock):
        return f"{_stem(layer.wrapper)}_before"
    return re.sub(r"_\d+$", "", layer.name) if graph.is_auto_named(layer) else layer.name


def _suffix(name: str) -> int:
    match = re.search(r"_(\d+)$", name)
    return int(match[1]) if match else 0
