"""Pictures of attribution graphs: features by token and block, from embeddings to logits."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.analysis.attribution_graph import LOGITS, AttributionGraph
from backbone_surgery.drawing.canvas import (
    DETAIL,
    NAME,
    check_dpi,
    draw_arrow,
    draw_node,
    new_page,
    save_page,
    size_of,
    text_width,
)
from backbone_surgery.drawing.circuits import BY_SIGN, width_of
from backbone_surgery.drawing.colours import COLOURS
from backbone_surgery.drawing.layout import Arrow, Point
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path
from backbone_surgery.numbers import check_count

_OPERATION = "plot_attribution_graph"
_NAME = re.compile(r"(?:blocks\.(\d+)\.)?(\w+)(?:\[(\d+)\])? @ (\d+)")
_TEXTS = {"transcoder_error": "error", "mlp_output": "MLP", "per_layer_output": "per layer"}
_ROW, _GAP, _TIP = 56.0, 12.0, 6.0
"""In points: from one row to the next, between nodes, and the length of the head of an arrow."""


Edge = tuple[str, str, float]
"""The names of the sender and the receiver, and the value."""


@dataclass(frozen=True)
class _Node:
    """A node: its row, 0 for embeddings and -1 for logits; its token; its text and colour.

    One without a colour is a text alone.
    """

    row: int
    token: int
    text: str
    colour: str


def plot_attribution_graph(
    graph: AttributionGraph, to_file: str = "graph.png", count: int = 40, dpi: int = 96
) -> Any:
    """Draw the edges of the greatest influence into a file.

    Tokens stand side by side, at the bottom, and blocks above each other, up to the logits.
    Features have their numbers; an error is what an MLP makes and the features of the graph do not.
    An arrow that is red raises what it leads to, a blue one lowers it, and the wider it is, the
    more influence it has. Edges that do not lead to the logits are left out.

    Args:
        graph: what `attribution_graph` returned, pruned or not.
        to_file: the file; its ending says the format: .png, .svg, .pdf, .jpg or .jpeg.
        count: how many edges, at most; see `AttributionGraph.top`.
        dpi: dots per inch of a .png or .jpg file.

    Returns:
        In a notebook the image of a png file, else `None`.

    Raises:
        SurgeryError: the file cannot be written, this is no attribution graph, or matplotlib is
            missing or cannot be loaded.
    """
    path = picture_path(to_file, _OPERATION)
    check_dpi(dpi, _OPERATION)
    if not isinstance(graph, AttributionGraph):
        raise SurgeryError(
            f"{_OPERATION}: expected an `AttributionGraph`. Received {shown(graph)}. Pass what "
            "`attribution_graph` returned."
        )
    check_count(_OPERATION, "count", count, "edges")
    import_extra(_OPERATION, "matplotlib")
    edges = _leading(graph.top(count))
    nodes = _nodes(edges, graph)
    rows = sorted({node.row for node in nodes.values()}, key=lambda row: (row < 0, row))
    heights = {row: i * _ROW + _GAP for i, row in enumerate(rows)}
    left = max(text_width(_title(row), DETAIL) for row in rows) + 2 * _GAP
    places, width = _places(nodes, left)
    ax = new_page((width, (len(rows) - 1) * _ROW + 2 * _GAP))
    for row, height in heights.items():
        ax.text(0, height, _title(row), va="center", color=COLOURS["layer"], **DETAIL)
    centers = {name: (x, heights[nodes[name].row]) for name, x in places.items()}
    _draw_edges(ax, edges, graph, centers)
    for name, node in nodes.items():
        if node.colour:
            draw_node(ax, node.colour, _label(node), centers[name], size_of(_label(node)))
        else:
            style = {"ha": "center", "va": "center", "color": COLOURS["layer"], **DETAIL}
            ax.text(*centers[name], node.text, parse_math=False, **style)
    return save_page(ax, path, _OPERATION, dpi)


def _draw_edges(
    ax: Any, edges: list[Edge], graph: AttributionGraph, centers: dict[str, Point]
) -> None:
    """Draw the arrows, those of the greatest influence over the others."""
    shares = [graph.shares[graph.senders.index(s), graph.receivers.index(r)] for s, r, _ in edges]
    for (sender, receiver, value), share in reversed(list(zip(edges, shares, strict=True))):
        arrow = _arrow(centers[sender], centers[receiver])
        draw_arrow(ax, arrow, BY_SIGN[int(np.sign(value))], width_of(share, max(shares)))


def _leading(edges: list[Edge]) -> list[Edge]:
    """Return the edges that lead to the logits."""
    reached, before = {LOGITS}, -1
    while len(reached) > before:
        before = len(reached)
        reached |= {sender for sender, receiver, _ in edges if receiver in reached}
    return [edge for edge in edges if edge[1] in reached]


def _nodes(edges: list[Edge], graph: AttributionGraph) -> dict[str, _Node]:
    """Return the nodes by name, and a text at the bottom for each token of others."""
    names = {name for edge in edges for name in edge[:2]} | {LOGITS}
    nodes = {name: _node(name, graph) for name in names}
    written = {node.token for node in nodes.values() if node.row == 0}
    for token in {node.token for node in nodes.values()} - written:
        nodes[f"token {token}"] = _Node(0, token, graph.tokens[token], "")
    return nodes


def _node(name: str, graph: AttributionGraph) -> _Node:
    found = _NAME.fullmatch(name)
    if found is None:
        return _Node(-1, len(graph.tokens) - 1, LOGITS, COLOURS["output"])
    block, role, feature, token = found.groups()
    if block is None:
        return _Node(0, int(token), graph.tokens[int(token)], COLOURS["input"])
    colour = "inserted" if feature else "stateful"
    return _Node(1 + int(block), int(token), feature or _TEXTS[role], COLOURS[colour])


def _label(node: _Node) -> list[Any]:
    return [(node.text, NAME)]


def _title(row: int) -> str:
    return {0: "embeddings", -1: ""}.get(row, f"block {row - 1}")


def _places(nodes: dict[str, _Node], left: float) -> tuple[dict[str, float], float]:
    """Place the nodes of each token beside each other: the middle of each, and the whole width."""
    cells: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, node in sorted(nodes.items()):
        cells[node.token][node.row].append(name)
    places = {}
    for token in sorted(cells):
        widths = {
            row: [size_of(_label(nodes[name]))[0] + _GAP for name in names]
            for row, names in cells[token].items()
        }
        most = max(sum(own) for own in widths.values())
        for row, names in cells[token].items():
            x = left + (most - sum(widths[row])) / 2
            for name, own in zip(names, widths[row], strict=True):
                places[name] = x + own / 2
                x += own
        left += most + _GAP
    return places, left


def _arrow(start: Point, end: Point) -> Arrow:
    """Return an arrow from the top of one node to the bottom of another."""
    height = size_of([("0", NAME)])[1]
    (x, y), (to_x, to_y) = (start[0], start[1] + height / 2), (end[0], end[1] - height / 2)
    bend = max(0.5 * (to_y - y), 0.3 * _ROW)
    base = to_y - _TIP
    return Arrow([(x, y), (x, y + bend), (to_x, base - bend), (to_x, base)], (to_x, to_y), False)
