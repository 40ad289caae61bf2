"""Where the nodes, frames and arrows of a picture go: rows of nodes, by Graphviz's `dot`.

`pygraphviz` brings that as a library. It is told sizes and sees no text, so a layout depends
neither on the fonts of a machine nor on the programs that are installed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backbone_surgery.drawing.picture import Picture
from backbone_surgery.drawing.routes import Routes, find_routes
from backbone_surgery.extras import import_extra

Point = tuple[float, float]
Size = tuple[float, float]
Box = tuple[float, float, float, float]

WITHOUT_EXTRAS = "Or use `backbone_surgery.to_mermaid(model)`, which needs no package."

_WEIGHTS = {"spine": 100, "chain": 50, "main": 10, "line": 5, "side": 1}
"""How straight each piece of an arrow is to be."""


@dataclass(frozen=True)
class Arrow:
    """One piece of an arrow.

    Attributes:
        curve: points of a chain of cubic Bézier curves.
        tip: where the head ends; `None` at a junction.
        is_side: whether it is drawn lighter.
    """

    curve: list[Point]
    tip: Point | None
    is_side: bool


@dataclass(frozen=True)
class Layout:
    """Places in points (1/72 inch), counted from the lower left.

    Attributes:
        size: width and height of the whole.
        centers: the center of each node.
        frames: left, bottom, right and top of each frame.
        arrows: all pieces of all arrows.
    """

    size: Size
    centers: list[Point]
    frames: list[Box]
    arrows: list[Arrow]


def lay_out(picture: Picture, sizes: list[Size], titles: list[Size], rankdir: str) -> Layout:
    """Place the nodes, frames and arrows of a picture.

    Args:
        picture: what to place.
        sizes: width and height of each node, in points.
        titles: width and height of the title of each frame, in points.
        rankdir: `"TB"` for top to bottom, `"LR"` for left to right.

    Raises:
        SurgeryError: pygraphviz is missing or cannot be loaded.
    """
    routes = find_routes(picture)
    text = "\n".join(_dot_lines(picture, routes, sizes, titles, rankdir))
    placed = run_dot(text, "plot_model", WITHOUT_EXTRAS)
    parts = {part["name"]: part for part in placed["objects"]}
    names = {part["_gvid"]: part["name"] for part in placed["objects"]}
    junctions = {name: numbers(parts[name]["pos"]) for name in routes.junctions}
    arrows = []
    for edge in placed.get("edges", []):
        if edge.get("style") != "invis":
            tail, head = names[edge["tail"]], names[edge["head"]]
            arrow = read_arrow(edge["pos"], routes.pieces[tail, head].is_side)
            # Graphviz ends a piece before the junction, small as that is.
            arrow.curve[0] = junctions.get(tail, arrow.curve[0])
            arrow.curve[-1] = junctions.get(head, arrow.curve[-1])
            arrows.append(arrow)
    return Layout(
        size=numbers(placed["bb"])[2:],
        centers=[numbers(parts[f"n{i}"]["pos"]) for i in range(len(picture.nodes))],
        frames=[numbers(parts[f"cluster_{i}"]["bb"]) for i in range(len(picture.frames))],
        arrows=arrows,
    )


def run_dot(text: str, operation: str, otherwise: str = "") -> dict[str, Any]:
    """Return what `dot` makes of a graph: its objects and edges, and where they are."""
    pygraphviz = import_extra(operation, "pygraphviz", otherwise)
    with pygraphviz.AGraph(string=text) as graph:
        return json.loads(graph.draw(format="json0", prog="dot"))


def read_arrow(text: str, is_side: bool = False) -> Arrow:
    """Read `e,x,y x0,y0 x1,y1 ...`: the tip, where there is one, and the points of the curves."""
    words = text.split()
    tip = numbers(words.pop(0)[2:]) if text.startswith("e,") else None
    return Arrow([numbers(word) for word in words], tip, is_side)


def numbers(text: str) -> Any:
    """Read numbers with commas between them."""
    return tuple(float(number) for number in text.split(","))


def _dot_lines(
    picture: Picture, routes: Routes, sizes: list[Size], titles: list[Size], rankdir: str
) -> Iterator[str]:
    yield f"digraph {{ rankdir={rankdir} nodesep=0.25 ranksep=0.3 newrank=true nslimit=8"
    yield 'node [shape=box fixedsize=true label=""]'
    yield from _contents(picture, None, routes, sizes, titles)
    for piece in routes.pieces.values():
        head = " arrowhead=none" if piece.head in routes.junctions else ""
        yield f"{piece.tail} -> {piece.head} [weight={_WEIGHTS[piece.role]}{head}]"
    for upper, lower in routes.below:
        yield f"{upper} -> {lower} [style=invis weight=0]"
    yield "}"


def _contents(
    picture: Picture,
    parent: int | None,
    routes: Routes,
    sizes: list[Size],
    titles: list[Size],
) -> Iterator[str]:
    """Declare what is in a frame, the frames inside it included."""
    groups = _groups(routes)
    for i, node in enumerate(picture.nodes):
        if node.frame == parent:
            width, height = (side / 72 for side in sizes[i])
            yield f"n{i} [width={width:.4f} height={height:.4f}{groups.get(f'n{i}', '')}]"
    for name, frame in routes.junctions.items():
        if frame == parent:
            yield f"{name} [shape=point width=0.01 height=0.01{groups.get(name, '')}]"
    for i, inner in enumerate(picture.frames):
        if inner.parent == parent:
            yield f"subgraph cluster_{i} {{ margin=10 label=<{_blank(titles[i])}>"
            yield from _contents(picture, i, routes, sizes, titles)
            yield "}"


def _groups(routes: Routes) -> dict[str, str]:
    """Name the straight line that a node or junction belongs to."""
    groups = {}
    for piece in routes.pieces.values():
        if piece.role == "line":
            groups[piece.head] = f" group={piece.head.partition('_')[0]}"
    for piece in routes.pieces.values():
        if piece.role == "spine":
            groups.update({piece.tail: " group=spine", piece.head: " group=spine"})
    return groups


def _blank(size: Size) -> str:
    """Return a label without text that takes up room."""
    width, height = size
    table = f'<table border="0" fixedsize="true" width="{width:.0f}" height="{height:.0f}">'
    return f"{table}<tr><td></td></tr></table>"
