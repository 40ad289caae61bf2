"""Selecting: the weights that belong to sites, and paths under other names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.site import is_block, places, select

Rename = Mapping[str, str | None] | Callable[[str], str | None]


def scopes(
    owner: keras.Model, selectors: str | Sequence[str], paths: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the scopes that hold the weights of the selected sites, each ending in a dot.

    The weights of a site are those of the layers that run between it and the sites before it; the
    weights of a block such as `blocks.3` are all that it has. The blocks are those of the owner.
    """
    chosen: Sequence[Any] = selectors if isinstance(selectors, list | tuple) else [selectors]
    opened = open_backbone(owner)
    listed = {place.path: place for place in places(opened)}
    nodes = graph.graph_nodes(opened)
    nested = [n.operation for n in nodes if graph.as_functional(n.operation) is not None]
    blocks = [layer for layer in nested if is_block(layer)]
    walls = {id(t) for n in nodes if n.operation in nested for t in n.outputs}
    walls |= {id(place.tensor) for place in listed.values()}
    names = {id(v): path for path, v in paths.items()}
    prefixes: set[str] = set()
    for path in (path for selector in chosen for path in select(selector, [*listed])):
        place = listed[path]
        if place.block is not None and path.count(".") == 1:
            scoped = [names[id(v)].split(".")[:2] for v in blocks[place.block].weights]
        else:
            above = graph.topological_nodes([place.tensor], walls - {id(place.tensor)})
            weights = [v for n in above for v in getattr(n.operation, "weights", ())]
            scoped = [names[id(v)].split(".")[:-1] for v in weights]
        prefixes.update(".".join([*parts, ""]) for parts in scoped)
    if not prefixes:
        raise SurgeryError(
            f"transfer_weights at only={selectors!r}: expected sites with weights. Received sites "
            "without any. Select the sites that layers with weights write, or whole blocks."
        )
    return tuple(sorted(prefixes))


def renamed(
    paths: Iterable[str], tied: Iterable[str], rename: Rename | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return `{path in the source: path in the destination}`, without what is to be left out.

    That of `paths`, of which no two get one name, and that of `tied`, other paths of the same
    arrays, which take new names by the same rules.
    """
    rule = rename if callable(rename) else _by_rules({} if rename is None else rename, paths, tied)
    names: dict[str, str] = {}
    origin: dict[str, str] = {}
    for path in paths:
        name = rule(path)
        if name is not None and (not isinstance(name, str) or name in origin):
            received = f"{name!r} for '{origin[name]}' too" if name in origin else f"{name!r}"
            raise SurgeryError(
                f"transfer_weights at '{path}': expected rename to give each array a path of its "
                f"own, or None to leave it out. Received {received}. Change the rules."
            )
        if name is not None:
            names[path], origin[name] = name, path
    return names, {path: name for path in tied if (name := rule(path)) is not None}


def _by_rules(rules: Any, *paths: Iterable[str]) -> Callable[[str], str | None]:
    """Return a function that applies the longest rule that fits: a path, or its first parts."""

    def fits(rule: str, path: str) -> bool:
        return f"{path}.".startswith(f"{rule}.")

    known = isinstance(rules, Mapping)
    unused = [x for x in rules if not any(fits(x, p) for p in chain(*paths))] if known else []
    if unused or not known:
        received = shown(unused if known else rules)
        raise SurgeryError(
            "transfer_weights at rename: expected rules for paths of the source, or a function of "
            f"a path. Received {received}, which fit none. Look at the paths with `weight_tree`."
        )

    def rename(path: str) -> str | None:
        rule = max((rule for rule in rules if fits(rule, path)), key=len, default=None)
        new = path if rule is None else rules[rule]
        return new + path[len(rule) :] if isinstance(new, str) and rule is not None else new

    return rename
