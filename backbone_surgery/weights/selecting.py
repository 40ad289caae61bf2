"""Selecting: the weights that belong to sites, and paths under other names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening import open_backbone
from backbone_surgery.site import is_block, places, select

Rename = Mapping[str, str | None] | Callable[[str], str | None]


def scopes(
    owner: keras.Model, selectors: str | Sequence[str], paths: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the scopes that hold the weights of the selected sites, each ending in a dot.

    The weights of a site are those of the layers that run between it and the sites before it; the
    weights of a block such as `blocks.3` are all that it has.

    Args:
        owner: the model that owns the weights; its blocks are the ones counted.
        selectors: one site selector or several.
        paths: the weights of the owner by path.

    Raises:
        SelectorError: a selector matches nothing.
        SurgeryError: the sites have no weights.
    """
    opened = open_backbone(owner)
    listed = places(opened)
    nodes = graph.graph_nodes(opened)
    nested = [n.operation for n in nodes if graph.as_functional(n.operation) is not None]
    blocks = [layer for layer in nested if is_block(layer)]
    walls = {id(t) for n in nodes if n.operation in nested for t in n.outputs}
    walls |= {id(place.tensor) for place in listed}
    names = {id(v): path for path, v in paths.items()}
    chosen: set[str] = set()
    for selector in [selectors] if isinstance(selectors, str) else selectors:
        for path in select(selector, [p.path for p in listed]):
            place = next(p for p in listed if p.path == path)
            if place.block is not None and path.count(".") == 1:
                found = [names[id(v)].split(".")[:2] for v in blocks[place.block].weights]
            else:
                above = graph.topological_nodes([place.tensor], walls - {id(place.tensor)})
                weights = [v for n in above for v in getattr(n.operation, "weights", ())]
                found = [names[id(v)].split(".")[:-1] for v in weights]
            chosen.update(".".join([*parts, ""]) for parts in found)
    if not chosen:
        raise SurgeryError(
            f"transfer_weights at only={selectors!r}: expected sites with weights. Received sites "
            "without any. Select the sites that layers with weights write, or whole blocks."
        )
    return tuple(sorted(chosen))


def renamed(paths: Sequence[str], rename: Rename | None) -> dict[str, str]:
    """Return `{path in the source: path in the destination}`, without what is to be left out.

    Raises:
        SurgeryError: a rule fits no path, or two paths get one name.
    """
    if rename is None:
        return {path: path for path in paths}
    if isinstance(rename, Mapping):
        unused = [rule for rule in rename if not any(_under(path, rule) for path in paths)]
        if unused:
            raise SurgeryError(
                f"transfer_weights at rename: expected rules for paths of the source. Received "
                f"{unused} too, which fit none. Look at the paths with `weight_tree`."
            )
    new: dict[str, str] = {}
    origin: dict[str, str] = {}
    for path in paths:
        name = _by_rules(path, rename) if isinstance(rename, Mapping) else rename(path)
        if name is None:
            continue
        if not isinstance(name, str) or name in origin:
            received = f"'{origin[name]}' there too" if name in origin else f"{name!r}"
            raise SurgeryError(
                f"transfer_weights at '{path}': expected rename to give each array a path of its "
                f"own, or None to leave it out. Received {received}. Change the rules."
            )
        new[path], origin[name] = name, path
    return new


def _by_rules(path: str, rules: Mapping[str, str | None]) -> str | None:
    """Apply the longest rule that fits: a whole path, or the first parts of one."""
    fitting = [rule for rule in rules if _under(path, rule)]
    if not fitting:
        return path
    rule = max(fitting, key=len)
    new = rules[rule]
    return None if new is None else new + path[len(rule) :]


def _under(path: str, rule: str) -> bool:
    return path == rule or path.startswith(f"{rule}.")
