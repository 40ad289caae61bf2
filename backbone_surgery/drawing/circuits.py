"""Pictures of circuits: the edges of a model that matter, from the embeddings to the logits."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from backbone_surgery.analysis.edges import Edges
from backbone_surgery.drawing.canvas import (
    DETAIL,
    NAME,
    Label,
    check_dpi,
    draw_arrow,
    draw_node,
    new_page,
    save_page,
    size_of,
)
from backbone_surgery.drawing.colours import COLOURS
from backbone_surgery.drawing.layout import Arrow, Point, numbers, read_arrow, run_dot
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path
from backbone_surgery.numbers import check_count

_OPERATION = "plot_circuit"
BY_SIGN = {1: "#b2182b", -1: "#2166ac", 0: "#8c959f"}
"""Of an arrow, by the sign of its value."""
_WIDTHS = (0.8, 4.0)
"""Of an arrow of no value, and of the greatest, in points."""

_PATH = re.compile(r"(blocks\.\d+)\.(\w+?)(?:_output|_outputs\[(\d+)\])?")
_READ = re.compile(r".*\.([qkv])(?:uery|ey|alue)\[\d+\]")
_PARTS = {
    "head": "head",
    "attention": "attention",
    "mlp": "MLP",
    "laurel": "Laurel",
    "per_layer": "per layer",
}

Link = tuple[str, str, str, float]
"""Who sends, who receives, as what (`q`, `k`, `v` or nothing), and the value."""


def plot_circuit(edges: Edges, to_file: str = "circuit.png", count: int = 30, dpi: int = 96) -> Any:
    """Draw the circuit of the edges of the greatest values into a file.

    From the embeddings at the top to the logits at the bottom, block by block. An arrow that is red
    raises the metric of the corrupted text, a blue one lowers it, and the wider it is, the more.
    By head q, k or v says whether it is read as a query, key or value; one that several heads share
    has an arrow to each. Edges that do not join the embeddings to the logits are left out, see
    `Edges.circuit`.

    Args:
        edges: what `edge_attribution` or `edge_patching` returned, of all receivers.
        to_file: the file; its ending says the format: .png, .svg, .pdf, .jpg or .jpeg.
        count: among how many edges, at most.
        dpi: dots per inch of a .png or .jpg file.

    Returns:
        In a notebook the image of a png file, else `None`.

    Raises:
        SurgeryError: the file cannot be written, these are no edges or none that join, or
            matplotlib or pygraphviz is missing or cannot be loaded.
    """
    path = picture_path(to_file, _OPERATION)
    check_dpi(dpi, _OPERATION)
    if not isinstance(edges, Edges):
        raise SurgeryError(
            f"{_OPERATION}: expected `Edges`. Received {shown(edges)}. Pass what "
            "`edge_attribution` or `edge_patching` returned."
        )
    import_extra(_OPERATION, "matplotlib")
    links = _links(edges, count)
    names = list(dict.fromkeys(name for link in links for name in link[:2]))
    labels = {name: _label(name) for name in names}
    placed = run_dot("\n".join(_dot_lines(links, labels)), _OPERATION)
    ax = new_page(numbers(placed["bb"])[2:])
    arrows = {edge.get("id"): edge["pos"] for edge in placed["edges"]}
    _draw_links(ax, links, [read_arrow(arrows[f"e{i}"]) for i in range(len(links))])
    centers = {part["name"]: part.get("pos") for part in placed["objects"]}
    for i, (name, label) in enumerate(labels.items()):
        draw_node(ax, _colour(name), label, numbers(centers[f"n{i}"]), size_of(label))
    return save_page(ax, path, _OPERATION, dpi)


def _links(edges: Edges, count: int) -> list[Link]:
    """Return what leads from node to node, those of the greatest values first."""
    check_count(_OPERATION, "count", count, "edges")
    circuit = edges.circuit(count)
    if not circuit:
        raise SurgeryError(
            f"{_OPERATION} at 'count': expected edges that join the embeddings to the logits. "
            f"Received {len(edges.top(count))} edges of which none do. Pass a greater count."
        )
    senders = {sender for sender, _, _ in circuit}
    links = []
    for sender, receiver, value in circuit:
        fed = edges.feeds[edges.receivers.index(receiver)]
        nodes = [name for name, is_fed in zip(edges.senders, fed, strict=True) if is_fed]
        read = _READ.fullmatch(receiver)
        for node in [name for name in nodes if name in senders] or [receiver]:  # the logits
            links.append((sender, node, read[1] if read else "", value))
    return links


def _label(name: str) -> Label:
    found = _PATH.fullmatch(name)
    if found is None:
        return [(name, NAME)]
    block, part, head = found.groups()
    part = _PARTS.get(part, part)
    return [(f"{part} {head}" if head else part, NAME), (block, DETAIL)]


def _colour(name: str) -> str:
    if _PATH.fullmatch(name) is None:
        return COLOURS["input"]
    return COLOURS["stateful" if "head" in name or "attention" in name else "layer"]


def _level(name: str) -> str:
    """Return what a node stands in a row with: the heads of its block."""
    return name.partition("[")[0]


def _dot_lines(links: list[Link], labels: dict[str, Label]) -> Iterator[str]:
    """Declare nodes and arrows; rows of nodes are below each other in the order of the model."""
    nodes = {name: f"n{i}" for i, name in enumerate(labels)}
    yield "digraph { nodesep=0.3 ranksep=0.45 newrank=true"
    yield 'node [shape=box fixedsize=true label=""]'
    for name, node in nodes.items():
        width, height = (side / 72 for side in size_of(labels[name]))
        yield f"{node} [width={width:.4f} height={height:.4f}]"
    rows: dict[str, list[str]] = {}
    for name in sorted(nodes, key=_place):
        rows.setdefault(_level(name), []).append(nodes[name])
    for row in rows.values():
        yield f"{{ rank=same {'; '.join(row)} }}"
    firsts = [row[0] for row in rows.values()]
    for upper, lower in pairwise(firsts):
        yield f"{upper} -> {lower} [style=invis weight=0]"
    for i, (sender, receiver, *_) in enumerate(links):
        yield f"{nodes[sender]} -> {nodes[receiver]} [id=e{i}]"
    yield "}"


def _place(name: str) -> tuple[int, int, int]:
    """Return where a node stands in the order of the model."""
    found = _PATH.fullmatch(name)
    if found is None:
        return (-1 if name == "embeddings" else 10**9, 0, 0)
    part = list(_PARTS).index(found[2]) if found[2] in _PARTS else len(_PARTS)
    return int(found[1].rpartition(".")[2]), part, int(found[3] or 0)


def _draw_links(ax: Any, links: list[Link], arrows: list[Arrow]) -> None:
    """Draw arrows, and the letters of those between the same two side by side."""
    most = max(abs(value) for *_, value in links) or 1.0
    for (_, _, _, value), arrow in zip(links, arrows, strict=True):
        width = width_of(value, most)
        draw_arrow(ax, Arrow(arrow.curve, None, False), "white", width + 1.5)
        draw_arrow(ax, arrow, BY_SIGN[int(np.sign(value))], width)
    between = [link[:2] for link in links]
    for i, ((_, _, read, value), arrow) in enumerate(zip(links, arrows, strict=True)):
        place = (1 + between[:i].count(between[i])) / (1 + between.count(between[i]))
        style = {"ha": "center", "va": "center", "color": BY_SIGN[int(np.sign(value))], **DETAIL}
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        if read:
            ax.text(*_along(arrow.curve, place), read, bbox=patch, zorder=1, **style)


def width_of(value: float, most: float) -> float:
    """Return the width of an arrow of a value, where the greatest is `most`."""
    return _WIDTHS[0] + (_WIDTHS[1] - _WIDTHS[0]) * abs(value) / most


def _along(curve: list[Point], share: float) -> Point:
    """Return the point of a chain of cubic Bézier curves after a share of them."""
    parts = len(curve) // 3
    start = min(int(share * parts), parts - 1)
    t = share * parts - start
    weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
    points = curve[3 * start : 3 * start + 4]
    x, y = (sum(w * p[axis] for w, p in zip(weights, points, strict=True)) for axis in (0, 1))
    return x, y
