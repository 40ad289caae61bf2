"""Paths: a stable name for each weight of a model, which does not depend on how it was made.

A path is the names of the layers around a weight, outermost first, and its own name. A weight of a
decoder block begins with `blocks.<number>`, whatever the block is called. A name that Keras made up
and numbered for the whole process (`dense_7`) is numbered anew within its layer (`dense`,
`dense_1`), in the order in which the layers were made. An edited model names its weights as the
owner of the weights does, so that skipping, repeating or reordering blocks renames nothing; the
layers that an edit put in are named by where they stand, in the order in which they run.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.family import known_families
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.site import is_block
from backbone_surgery.rewriting.wrap import BeforeBlock

Places = Iterator[tuple[str, keras.Variable]]


def resolve(model: Any, operation: str = "weights") -> keras.Model:
    """Return the model whose weights are meant: a task's backbone, a cached graph's source.

    Args:
        model: what was passed.
        operation: named in the error.
    """
    if isinstance(model, keras_hub.models.CausalLM):
        model = model.backbone
    if isinstance(model, BackboneWithCache):
        model = model.source
    if not isinstance(model, keras.Model) or not model.weights:
        received = "a model without weights" if isinstance(model, keras.Model) else repr(model)
        raise SurgeryError(
            f"{operation}: expected a built Keras model. Received {received} of type "
            f"{type(model).__name__}. Pass a backbone, what `operate` made of one, or a task; "
            "`CachedCausalLM.from_preset` loads one by its name."
        )
    return model


def owner_of(model: keras.Model) -> keras.Model:
    """Return the model that owns the weights of a graph: itself, unless it was opened from one."""
    return model.owner if isinstance(model, EditedBackbone) else model


def variable_paths(model: Any) -> dict[str, keras.Variable]:
    """Return each weight of a model once, by its path; those that an edit put in come last.

    A variable that several layers share is there once, under the first of its paths.
    """
    model = resolve(model)
    owner = owner_of(model)
    paths = _unique(_places(owner))
    if model is not owner:
        paths.update(extra_paths(model, paths))
    return paths


def aliases(model: Any) -> dict[str, str]:
    """Return `{other path: path}` of the weights that a second layer of the model holds too."""
    owner = owner_of(resolve(model))
    own = {id(v): path for path, v in _unique(_places(owner)).items()}
    return {path: own[id(v)] for path, v in _places(owner) if own[id(v)] != path}


def extra_paths(
    edited: EditedBackbone, owner_paths: dict[str, keras.Variable]
) -> dict[str, keras.Variable]:
    """Return the weights of an edited graph that its owner does not have, by path.

    Layers are counted as they run: the same rewrites give the same paths in any process.
    """
    known = {id(v): path for path, v in owner_paths.items()}
    extra: dict[str, keras.Variable] = {}
    taken: Counter[str] = Counter()

    def walk(model: keras.Model, scope: str) -> None:
        for node in graph.graph_nodes(model):
            layer = node.operation
            nested = graph.as_functional(layer)
            if nested is not None:
                walk(nested, _block_scope(nested, known) or scope)
            elif any(id(v) not in known for v in getattr(layer, "weights", ())):
                stem = f"{scope}{_stem(layer)}"
                prefix = f"{stem}_{taken[stem]}." if taken[stem] else f"{stem}."
                taken[stem] += 1
                for path, variable in _places(layer, prefix):
                    if known.setdefault(id(variable), path) == path:
                        extra[path] = variable

    walk(edited, "")
    return extra


def is_lora(path: str) -> bool:
    """Tell whether a path is that of a LoRA factor."""
    return path.rpartition(".")[2].startswith("lora_")


def _unique(places: Places) -> dict[str, keras.Variable]:
    """Keep one place of each weight."""
    paths: dict[int, tuple[str, keras.Variable]] = {}
    for path, variable in places:
        paths.setdefault(id(variable), (path, variable))
    return dict(paths.values())


def _block_scope(nested: keras.Model, known: dict[int, str]) -> str | None:
    """Return the scope of an opened block: the owner's block that its weights belong to."""
    paths = (known.get(id(v), "") for v in nested.weights if is_block(nested))
    scopes = (re.match(r"blocks\.\d+\.", path) for path in paths)
    return next((match[0] for match in scopes if match), None)


def _places(outer: keras.Layer, prefix: str = "") -> Places:
    """Yield each path at which a layer, or one in it, holds a weight, and the weight."""
    numbers = _block_numbers(outer)
    walked = set()

    def walk(layer: keras.Layer, prefix: str) -> Places:
        walked.add(layer)
        own = graph.own_weights(layer)
        names = _numbered((v.name, bool(re.fullmatch(r"variable(_\d+)?", v.name))) for v in own)
        yield from ((f"{prefix}{name}", v) for name, v in zip(names, own, strict=True))
        parts = [x for x in dict.fromkeys(graph.sublayers(layer)) if x.weights]
        names = _numbered((x.name, graph.is_auto_named(x)) for x in parts)
        for name, part in zip(names, parts, strict=True):
            if part not in walked:
                block = f"blocks.{numbers[part]}." if part in numbers else None
                yield from walk(part, block or f"{prefix}{name}.")

    return walk(outer, prefix)


def _numbered(names: Iterable[tuple[str, bool]]) -> list[str]:
    """Number the names that Keras made up (so each says) anew, and tell equal names apart."""
    listed = [(name.replace(".", "_"), made_up) for name, made_up in names]
    ordered = sorted({name for name, made_up in listed if made_up}, key=_suffix)
    counts: Counter[str] = Counter()
    renamed = {}
    for name in ordered:
        stem = re.sub(r"_\d+$", "", name)
        renamed[name] = f"{stem}_{counts[stem]}" if counts[stem] else stem
        counts[stem] += 1
    unique: list[str] = []
    for name, made_up in listed:
        name, count = renamed[name] if made_up else name, 0
        while (f"{name}#{count}" if count else name) in unique:
            count += 1
        unique.append(f"{name}#{count}" if count else name)
    return unique


def _block_numbers(model: keras.Layer) -> dict[keras.Layer, int]:
    """Number blocks: by their names where their authors numbered them, else in the order made."""
    kinds = tuple(family.block for family in known_families())
    blocks = [layer for layer in graph.layers_within(model) if isinstance(layer, kinds)]
    stems = {re.sub(r"_\d+$", "", block.name) for block in blocks}
    numbers = [_suffix(block.name) for block in blocks if re.search(r"_\d+$", block.name)]
    named = len(stems) == 1 and len(set(numbers)) == len(blocks)
    if named and not any(graph.is_auto_named(block) for block in blocks):
        return dict(zip(blocks, numbers, strict=True))
    return {block: i for i, block in enumerate(sorted(blocks, key=lambda b: _suffix(b.name)))}


def _stem(layer: keras.Layer) -> str:
    if isinstance(layer, BeforeBlock):
        return f"{_stem(layer.wrapper)}_before"
    return re.sub(r"_\d+$", "", layer.name) if graph.is_auto_named(layer) else layer.name


def _suffix(name: str) -> int:
    match = re.search(r"_(\d+)$", name)
    return int(match[1]) if match else 0
