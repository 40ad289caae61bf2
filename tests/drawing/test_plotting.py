"""Pictures are files in every format, on a machine that has nothing but what pip brings."""

import dataclasses
import re
import sys

import numpy as np
import pytest
from matplotlib import image

import backbone_surgery as bs
from backbone_surgery.analysis.logit_lens import LogitLens
from backbone_surgery.analysis.patch_grid import PatchGrid
from backbone_surgery.drawing.canvas import NAME, size_of, text_width
from backbone_surgery.drawing.layout import lay_out
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.drawing.plotting import _draw, _label
from tests.families import ROWS
from tests.helpers import make_deep_gpt2, make_gpt2
from tests.transcoders import arrays, save_gemma_scope_2

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
def test_a_title_stands_beside_the_arrow_that_comes_in(name, rankdir):
    if name == "skipped":
        edited = bs.operate(make_deep_gpt2(), [bs.Skip("blocks.1")])
    else:
        steer = bs.Steer("mood", {0: np.ones(32), 1: np.ones(32)})
        edited = bs.operate(make_gpt2(), [steer, bs.Capture("blocks.*")])
    picture = make_picture(edited, True)
    labels = [_label(node, False) for node in picture.nodes]
    titles = [(text_width(frame.name, NAME), 13.0) for frame in picture.frames]
    layout = lay_out(picture, [size_of(label) for label in labels], titles, rankdir)
    ax = _draw(picture, layout, labels, [size_of(x) for x in labels])
    texts = {x.get_text(): x for x in ax.texts}
    points = np.concatenate([along(arrow.curve) for arrow in layout.arrows])
    for frame in picture.frames:
        text = texts[frame.name]
        (left, y), width = text.get_position(), text_width(frame.name, NAME)
        inside = [p for p in points if left <= p[0] <= left + width and abs(p[1] - y) <= 6]
        assert not inside, frame.name


def test_a_bad_rankdir_is_refused(models, tmp_path):
    with pytest.raises(bs.SurgeryError, match=r"rankdir to be one of TB, LR\. Received 'BT'"):
        bs.plot_model(models("nested"), str(tmp_path / "model.png"), rankdir="BT")


@pytest.fixture(scope="module")
def edges():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=2))
    return bs.edge_attribution(lm, [1, 2, 3], [1, 4, 3], (5, 6), by_head=True)


@pytest.mark.slow
@pytest.mark.usefixtures("graphviz")
def test_a_picture_of_a_circuit_has_an_arrow_for_each_edge(edges, tmp_path):
    path = tmp_path / "circuit.svg"
    assert bs.plot_circuit(edges, str(path), count=30) is None
    svg, circuit = path.read_text(), edges.circuit(30)
    written = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    read = [receiver.rpartition(".")[2][0] for _, receiver, _ in circuit if "[" in receiver]
    assert sorted(x for x in written if len(x) == 1) == sorted(read)
    senders = {sender for sender, _, _ in circuit}
    heads = [f"head {name[-2]}" for name in senders if "[" in name]
    assert sorted(x for x in written if x.startswith("head ")) == sorted(heads)
    assert written.count("embeddings") == written.count("logits") == 1
    raised = sum(value > 0 for *_, value in circuit)
    assert svg.count("stroke: #b2182b") == raised
    assert svg.count("stroke: #2166ac") == len(circuit) - raised
    assert 0 < raised < len(circuit)
    zero = dataclasses.replace(edges, values=0 * edges.values)
    bs.plot_circuit(zero, str(path), count=200)
    assert path.read_text().count("stroke: #8c959f") == len(zero.order())


@pytest.mark.slow
@pytest.mark.usefixtures("graphviz")
def test_a_key_of_several_heads_leads_to_each_of_them(tmp_path):
    lm = bs.CachedCausalLM(ROWS["llama"].make())
    edges = bs.edge_attribution(lm, [1, 2, 3], [1, 4, 3], (5, 6), by_head=True)
    fed = edges.feeds[edges.receivers.index("blocks.0.key[1]")]
    assert [edges.senders[i] for i in fed.nonzero()[0]] == [
        f"blocks.0.head_outputs[{head}]" for head in (2, 3)
    ]
    path = tmp_path / "circuit.svg"
    bs.plot_circuit(edges, str(path), count=60)
    circuit = edges.circuit(60)
    heads = {sender for sender, _, _ in circuit if "[" in sender}
    kinds = [receiver.partition("[")[0] for _, receiver, _ in circuit]
    assert {"blocks.0.head_outputs[2]", "blocks.0.head_outputs[3]"} <= heads
    drawn = re.findall(r">([qkv])</text>", path.read_text())
    assert drawn.count("q") == sum(kind.endswith("query") for kind in kinds)
    assert drawn.count("v") > sum(kind.endswith("value") for kind in kinds)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("transcoders")
    paths = [save_gemma_scope_2(folder / str(i), arrays(rng), i) for i in range(2)]
    rewrites = [
        bs.Transcoder(f"blocks.{i}.mlp_output", path, name=f"mlp_{i}", error=True)
        for i, path in enumerate(paths)
    ]
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(num_layers=2), rewrites))
    return bs.attribution_graph(lm, [1, 2, 3], (5, 6))


@pytest.mark.slow
def test_a_picture_of_an_attribution_graph_has_an_arrow_for_each_edge(graph, tmp_path):
    """That leads to the logits, from and to nodes over their tokens."""
    path = tmp_path / "graph.svg"
    assert bs.plot_attribution_graph(graph, str(path), count=40) is None
    svg, edges = path.read_text(), graph.top(40)
    reached = {"logits"}
    for _ in range(3):
        reached |= {sender for sender, receiver, _ in edges if receiver in reached}
    drawn = [edge for edge in edges if edge[1] in reached]
    assert len(drawn) > 10
    raised = sum(value > 0 for *_, value in drawn)
    assert svg.count("stroke: #b2182b") == raised
    assert svg.count("stroke: #2166ac") == len(drawn) - raised
    written = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    numbers = re.findall(r"\[(\d+)\]", " ".join(reached))
    tokens = {int(name.rpartition(" ")[2]) for name in reached - {"logits"}} | {2}
    known = {"logits", "error", "embeddings", "block 0", "block 1"}
    others = [text for text in written if text not in known]
    assert sorted(others) == sorted([*numbers, *(graph.tokens[token] for token in tokens)])
    assert written.count("error") == sum("transcoder_error" in name for name in reached)


@pytest.mark.slow
def test_what_is_no_attribution_graph_is_not_drawn(graph, tmp_path):
    path = str(tmp_path / "graph.png")
    with pytest.raises(bs.SurgeryError, match="expected an `AttributionGraph`"):
        bs.plot_attribution_graph(graph.values, path)
    with pytest.raises(bs.SurgeryError, match="plot_attribution_graph at 'count'"):
        bs.plot_attribution_graph(graph, path, count=0)
    with pytest.raises(bs.SurgeryError, match="plot_attribution_graph: expected dpi"):
        bs.plot_attribution_graph(graph, path, dpi=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_no_circuit_is_not_drawn(edges, tmp_path):
    path = str(tmp_path / "circuit.png")
    with pytest.raises(bs.SurgeryError, match="plot_circuit: expected `Edges`"):
        bs.plot_circuit(edges.values, path)
    with pytest.raises(bs.SurgeryError, match="Received 1 edges of which none do"):
        bs.plot_circuit(edges, path, count=1)
    with pytest.raises(bs.SurgeryError, match="plot_circuit at 'count'"):
        bs.plot_circuit(edges, path, count=0)
    with pytest.raises(bs.SurgeryError, match="plot_circuit: expected dpi"):
        bs.plot_circuit(edges, path, dpi=0)
    with pytest.raises(bs.SurgeryError, match=r"plot_circuit at '.*': expected a file that ends"):
        bs.plot_circuit(edges, str(tmp_path / "circuit.gif"))
    assert not list(tmp_path.iterdir())
