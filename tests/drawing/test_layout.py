"""Nothing overlaps, frames hold what is in them, and the residual stream is straight."""

import itertools

import pytest

from backbone_surgery.drawing.layout import lay_out
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.drawing.routes import find_routes, residual_stream
from tests.drawing.conftest import MODELS

pytestmark = pytest.mark.usefixtures("graphviz")

SIZE = (110.0, 30.0)


def layout_of(picture, rankdir="TB"):
    sizes = [SIZE] * len(picture.nodes)
    return lay_out(picture, sizes, [(80.0, 13.0)] * len(picture.frames), rankdir)


def boxes_of(layout):
    (width, height) = SIZE
    return [
        (x - width / 2, y - height / 2, x + width / 2, y + height / 2) for x, y in layout.centers
    ]


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def holds(outer, inner):
    return all(o <= i for o, i in zip(outer[:2], inner[:2], strict=True)) and all(
        o >= i for o, i in zip(outer[2:], inner[2:], strict=True)
    )


@pytest.mark.by_default(2)
@pytest.mark.parametrize("rankdir", ["TB", "LR"])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_nodes_and_frames_have_room(models, name, expand, rankdir):
    picture = make_picture(models(name), expand)
    layout = layout_of(picture, rankdir)
    boxes = boxes_of(layout)
    assert not [1 for a, b in itertools.combinations(boxes, 2) if overlap(a, b)]
    assert all(holds((0, 0, *layout.size), box) for box in boxes)
    for i, (frame, area) in enumerate(zip(picture.frames, layout.frames, strict=True)):
        inside = {n for n, node in enumerate(picture.nodes) if node.frame == i}
        assert all(holds(area, boxes[n]) for n in inside)
        if frame.parent is not None:
            assert holds(layout.frames[frame.parent], area)
        elif not any(f.parent is not None for f in picture.frames):
            others = set(range(len(boxes))) - inside
            assert not [n for n in others if overlap(area, boxes[n])]


@pytest.mark.by_default(2)
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "nested"])
def test_the_residual_stream_is_straight_and_runs_down(models, name, expand):
    picture = make_picture(models(name), expand)
    stream = residual_stream(picture)
    names = [picture.nodes[i].name for i in stream]
    assert names[:2] == ["token_ids", "token_embedding"]
    assert names[-1].endswith("output")
    blocks = {
        i for i, n in enumerate(picture.nodes) if n.kind == "block" or n.name == "mlp_residual"
    }
    assert blocks <= set(stream)
    centers = layout_of(picture).centers
    places = [centers[i] for i in stream]
    assert max(x for x, _ in places) - min(x for x, _ in places) < 2
    assert all(above > below for (_, above), (_, below) in itertools.pairwise(places))


@pytest.mark.by_default(2)
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_arrows_lead_where_the_graph_says(models, name, expand):
    """The pieces of arrows, followed through junctions, are the arrows of the picture."""
    picture = make_picture(models(name), expand)
    routes = find_routes(picture)
    onward = {}
    for tail, head in routes.pieces:
        onward.setdefault(tail, []).append(head)

    def ends(name):
        return (
            {int(name[1:])}
            if name not in routes.junctions
            else set().union(*map(ends, onward[name]))
        )

    followed = {
        (i, end)
        for i in range(len(picture.nodes))
        for head in onward.get(f"n{i}", ())
        for end in ends(head)
    }
    assert followed == set(picture.edges)
    layout = layout_of(picture)
    assert len(layout.arrows) == len(routes.pieces)
    assert sum(a.tip is None for a in layout.arrows) == sum(
        h in routes.junctions for _, h in routes.pieces
    )


def test_a_layout_is_the_same_every_time(models):
    picture = make_picture(models("steered"), True)
    assert layout_of(picture) == layout_of(picture)
