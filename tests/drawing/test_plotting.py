"""Pictures are files in every format, on a machine that has nothing but what pip brings."""

import re
import sys

import numpy as np
import pytest
from matplotlib import image

import backbone_surgery as bs
from backbone_surgery.analysis.logit_lens import LogitLens
from backbone_surgery.analysis.patch_grid import PatchGrid
from backbone_surgery.drawing.layout import lay_out
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.drawing.plotting import _NAME, _draw, _label, _size, _width
from tests.helpers import make_deep_gpt2, make_gpt2

SIGNATURES = {
    ".PNG": b"\x89PNG",
    ".jpeg": b"\xff\xd8\xff",
    ".png": b"\x89PNG",
    ".pdf": b"%PDF",
    ".jpg": b"\xff\xd8\xff",
    ".svg": b"<?xml",
}


@pytest.mark.usefixtures("graphviz")
@pytest.mark.parametrize("ending", list(SIGNATURES))
def test_formats(models, tmp_path, monkeypatch, ending):
    monkeypatch.setenv("PATH", str(tmp_path))  # no program is run
    path = tmp_path / f"model{ending}"
    assert bs.plot_model(models("nested"), str(path)) is None
    assert path.read_bytes().startswith(SIGNATURES[ending])


@pytest.mark.by_default(4)
@pytest.mark.usefixtures("graphviz")
@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ["steered", "conditioned, with caches", "nested"])
def test_the_picture_names_every_node_and_frame(models, tmp_path, name, expand, shapes):
    path = tmp_path / "model.svg"
    bs.plot_model(models(name), str(path), expand_nested=expand, show_shapes=shapes)
    written = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())
    picture = make_picture(models(name), expand)
    expected = [frame.name for frame in picture.frames]
    for node in picture.nodes:
        expected += [node.name, node.description, *(node.shapes if shapes else ())]
    assert written == expected


@pytest.mark.usefixtures("graphviz")
def test_colours_tell_the_kinds(models, tmp_path):
    path = tmp_path / "model.svg"
    bs.plot_model(models("steered"), str(path), expand_nested=True)
    fills = re.findall(r"fill: (#\w+)", path.read_text())
    assert fills.count("#0969da") == 6  # three caches, before and after
    assert fills.count("#bc4c00") == 3
    assert fills.count("#1a7f37") == 3  # doubled, scale_mood, steer_mood


@pytest.mark.usefixtures("graphviz")
def test_rankdir_and_dpi_choose_the_size(models, tmp_path):
    def size(**kwargs):
        path = tmp_path / "model.png"
        bs.plot_model(models("nested"), path, **kwargs)
        return image.imread(path).shape[:2]

    (height, width), (wide_height, wide_width) = size(), size(rankdir="LR")
    assert height > width
    assert wide_width > wide_height
    assert size(dpi=192) == pytest.approx((2 * height, 2 * width), abs=1)


@pytest.mark.parametrize("sites", [1, 2, 9])
def test_the_label_of_the_colours_is_inside_the_figure(sites):
    values, tokens = np.linspace(0, 1, 3 * sites).reshape(sites, 3), ["a", "b", "c"]
    names = [f"blocks.{i}" for i in range(sites)]
    results = [
        bs.plot_grid(PatchGrid(values, 1.0, 0.0, names, tokens)),
        bs.plot_lens(LogitLens(values, values, values, [["x"] * 3] * sites, names, tokens)),
    ]
    for ax in results:
        ax.figure.canvas.draw()
        box = ax.figure.axes[1].yaxis.label.get_window_extent()
        assert 0 <= box.y0 <= box.y1 <= ax.figure.bbox.height


@pytest.mark.usefixtures("graphviz")
def test_dollar_signs_are_text(tmp_path):
    import keras

    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(2, name="$a^b$")(x))
    bs.plot_model(model, str(tmp_path / "model.svg"))
    assert ">$a^b$</text>" in (tmp_path / "model.svg").read_text()


@pytest.mark.parametrize("package", ["matplotlib", "pygraphviz"])
def test_a_missing_package_says_how_to_get_it(models, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(bs.SurgeryError, match=rf"Run `pip install {package}`.*to_mermaid"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.xyz", "ends in one of .png, .*Received the ending '.xyz'"),
        ("model", "Received the ending ''"),
        ("missing/model.png", "expected a file in a folder that exists"),
    ],
)
def test_bad_files_are_refused(models, tmp_path, name, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.plot_model(models("nested"), str(tmp_path / name))


@pytest.mark.parametrize("dpi", [0, "a", True, 10**9])
def test_a_bad_dpi_is_refused(models, tmp_path, dpi):
    with pytest.raises(bs.SurgeryError, match="expected dpi to be an integer from 1 to 2400"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"), dpi=dpi)


@pytest.mark.usefixtures("graphviz")
def test_lines_meet_at_junctions(models):
    picture = make_picture(models("steered"), True)
    sizes = [(80.0, 30.0)] * len(picture.nodes)
    layout = lay_out(picture, sizes, [(80.0, 13.0)] * len(picture.frames), "TB")
    ends = [arrow.curve[-1] for arrow in layout.arrows if arrow.tip is None]
    starts = {arrow.curve[0] for arrow in layout.arrows}
    assert ends
    assert set(ends) <= starts


def along(curve):
    """Points of a chain of cubic Bézier curves, float[points, 2]."""
    t = np.linspace(0, 1, 400)[:, None]
    weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
    parts = [np.array(curve[i : i + 4]) for i in range(0, len(curve) - 1, 3)]
    return np.concatenate([sum(w * p for w, p in zip(weights, x, strict=True)) for x in parts])


@pytest.mark.by_default(1)
@pytest.mark.usefixtures("graphviz")
@pytest.mark.parametrize("rankdir", ["TB", "LR"])
@pytest.mark.parametrize("name", ["skipped", "captured"])
def test_a_title_stands_beside_the_arrow_that_comes_in(tmp_path, name, rankdir):
    if name == "skipped":
        edited = bs.operate(make_deep_gpt2(), [bs.Skip("blocks.1")])
    else:
        steer = bs.Steer("mood", {0: np.ones(32), 1: np.ones(32)})
        edited = bs.operate(make_gpt2(), [steer, bs.Capture("blocks.*")])
    picture = make_picture(edited, True)
    labels = [_label(node, False) for node in picture.nodes]
    titles = [(_width(frame.name, _NAME), 13.0) for frame in picture.frames]
    layout = lay_out(picture, [_size(label) for label in labels], titles, rankdir)
    figure = _draw(picture, layout, labels, [_size(x) for x in labels], tmp_path / "x.png", 96)
    texts = {x.get_text(): x for x in figure.axes[0].texts}
    points = np.concatenate([along(arrow.curve) for arrow in layout.arrows])
    for frame in picture.frames:
        text = texts[frame.name]
        (left, y), width = text.get_position(), _width(frame.name, _NAME)
        inside = [p for p in points if left <= p[0] <= left + width and abs(p[1] - y) <= 6]
        assert not inside, frame.name


def test_a_bad_rankdir_is_refused(models, tmp_path):
    with pytest.raises(bs.SurgeryError, match=r"rankdir to be one of TB, LR\. Received 'BT'"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"), rankdir="BT")
