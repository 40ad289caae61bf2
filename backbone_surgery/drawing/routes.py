"""Which ways the arrows of a picture take, before anything has a place.

The *residual stream* is one way from the first input to the first output, and is drawn straight.
Arrows part late: where a layer leads to several in the same frame, its arrows run as one up to a
*junction* inside that frame. An input of many nodes outside of frames, such as `cache_mask` where
blocks are collapsed, gets a line along them, with a junction for each.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from backbone_surgery.drawing.picture import Picture

Edge = tuple[int, int]

_MANY = 3
"""How many nodes an input leads to when it gets a line of its own."""


@dataclass(frozen=True)
class Route:
    """A piece of an arrow, between nodes (`n0`, `n1`, ...) and junctions.

    Attributes:
        role: `spine` for the residual stream, `chain` for a way without forks, `main` for other
            ways between layers, `side` for ways from inputs, to outputs and of caches, `line`
            between the junctions of an input of many nodes.
    """

    tail: str
    head: str
    role: str

    @property
    def is_side(self) -> bool:
        """Whether it is drawn lighter than the ways between layers."""
        return self.role in ("side", "line")


@dataclass
class Routes:
    """All pieces of all arrows.

    Attributes:
        pieces: by the names of their ends.
        junctions: for each junction, the frame that it is in; `None` outside of all.
        below: pairs of names; the second one is to stand below the first, with no arrow.
    """

    pieces: dict[tuple[str, str], Route] = field(default_factory=dict)
    junctions: dict[str, int | None] = field(default_factory=dict)
    below: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tail: str, head: str, role: str) -> str:
        """Add a piece, unless it is there, and return its head."""
        if role == "spine" or (tail, head) not in self.pieces:
            self.pieces[tail, head] = Route(tail, head, role)
        return head


def find_routes(picture: Picture) -> Routes:
    """Find the ways of all arrows of a picture."""
    spine = residual_stream(picture)
    roles = _roles(picture, spine)
    routes = Routes()
    _route_inputs(picture, [edge for edge in picture.edges if roles[edge] == "side"], routes)
    _route_layers(picture, {e: role for e, role in roles.items() if role != "side"}, routes)
    _put_frames_below_each_other(picture, spine, routes)
    return routes


def residual_stream(picture: Picture) -> list[int]:
    """Return the shortest way to the first output through tensors of its shape, and its input."""
    outputs = [i for i, node in enumerate(picture.nodes) if node.kind == "output"][:1]
    onward: dict[int, list[int]] = {i: [i] for i in outputs}
    queue = deque(outputs)
    while queue:
        here = queue.popleft()
        for source, target in picture.edges:
            alike = set(picture.nodes[source].shapes) >= set(picture.nodes[outputs[0]].shapes)
            if target == here and alike and source not in onward:
                onward[source] = [source, *onward[here]]
                queue.append(source)
    stream = onward[min(onward)] if onward else []
    above = [source for source, target in picture.edges if stream[:1] == [target]]
    return [*above[:1], *stream]


def _roles(picture: Picture, spine: list[int]) -> dict[Edge, str]:
    side = {i for i, n in enumerate(picture.nodes) if n.kind in ("input", "output", "cache")}
    main = [edge for edge in picture.edges if not side & set(edge)]
    leaving, coming = Counter(s for s, _ in main), Counter(t for _, t in main)
    roles = dict.fromkeys(picture.edges, "side")
    roles.update({(s, t): "chain" if leaving[s] == coming[t] == 1 else "main" for s, t in main})
    return {**roles, **dict.fromkeys(pairwise(spine), "spine")}


def _route_inputs(picture: Picture, edges: list[Edge], routes: Routes) -> None:
    leading_to: dict[int, list[int]] = {}
    for source, target in edges:
        if picture.nodes[source].kind == "input" and picture.nodes[target].frame is None:
            leading_to.setdefault(source, []).append(target)
        else:
            routes.add(f"n{source}", f"n{target}", "side")
    for source, targets in leading_to.items():
        here = f"n{source}"
        *others, last = sorted(targets)
        for target in others:
            routes.add(here, f"n{target}", "side")
            if len(targets) >= _MANY and target != others[-1]:
                here = routes.add(here, f"line{source}_{target}", "line")
                routes.junctions[here] = None
        routes.add(here, f"n{last}", "side")


def _route_layers(picture: Picture, roles: dict[Edge, str], routes: Routes) -> None:
    entered = {edge: _frames_entered(picture, *edge) for edge in roles}
    shared = Counter((source, f) for (source, _), frames in entered.items() for f in frames)
    for (source, target), role in roles.items():
        here = f"n{source}"
        for frame in entered[source, target]:
            if shared[source, frame] > 1:
                here = routes.add(here, f"junction{source}_{frame}", role)
                routes.junctions[here] = frame
        routes.add(here, f"n{target}", role)


def _put_frames_below_each_other(picture: Picture, spine: list[int], routes: Routes) -> None:
    """Keep what is in a frame above all that the residual stream reaches after it."""
    onward = {piece.tail: piece.head for piece in routes.pieces.values() if piece.role == "spine"}
    for source, target in pairwise(spine):
        for frame in _frames_entered(picture, target, source)[:1]:
            inside = {i for i in range(len(picture.nodes)) if frame in _frames_around(picture, i)}
            last = inside - {source} - {s for s, t in picture.edges if t in inside}
            routes.below += [(f"n{i}", onward[f"n{source}"]) for i in sorted(last)]


def _frames_entered(picture: Picture, source: int, target: int) -> list[int]:
    """List the frames around the target that are not around the source, the outermost first."""
    around_source = _frames_around(picture, source)
    return [f for f in reversed(_frames_around(picture, target)) if f not in around_source]


def _frames_around(picture: Picture, node: int) -> list[int]:
    frames, frame = [], picture.nodes[node].frame
    while frame is not None:
        frames.append(frame)
        frame = picture.frames[frame].parent
    return frames
