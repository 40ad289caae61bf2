"""Pictures show the caches, the blocks and every inserted layer by name."""

import re
import shutil

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.conftest import make_gpt2

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


class Doubled(keras.layers.Layer):
    def call(self, x):
        return x * 2


@pytest.fixture(scope="module")
def model():
    steer = bs.Steer("mood", {1: np.ones(32)})
    backbone = make_gpt2()

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return Doubled(name="doubled")(result) if layer.name == "transformer_layer_0" else result

    return bs.rewire(bs.operate(backbone, [clone_fn, steer]))


@needs_dot
@pytest.mark.parametrize("expand", [False, True])
def test_picture_holds_every_layer(model, tmp_path, expand):
    path = tmp_path / "model.svg"
    bs.plot_model(model, str(path), expand_nested=expand)
    text = path.read_text()
    for name in ("cache_0", "cache_2_updated", "cache_update_index", "doubled", "mood_strength"):
        assert name in text
    assert ("cached_self_attention" in text) == expand
    assert ("steer_mood" in text) == expand
    assert "site_" not in text
    assert len(re.findall('class="cluster"', text)) == (3 if expand else 0)


@needs_dot
def test_png_is_a_png(model, tmp_path):
    path = tmp_path / "model.png"
    bs.plot_model(model, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_mermaid_holds_the_same_graph(model):
    text = bs.to_mermaid(model, expand_nested=True)
    assert text.count("subgraph") == 3
    nodes = set(re.findall(r"^\s+(n\d+)[\[(]", text, re.M))
    edges = re.findall(r"(n\d+) --> (n\d+)", text)
    assert {n for edge in edges for n in edge} == nodes
    label = {n: rest for n, rest in re.findall(r'(n\d+)[\[(]+"([^"]+)"', text)}
    named = {(label[a].split("<")[0], label[b].split("<")[0]) for a, b in edges}
    assert ("cache_0", "cached_self_attention") in named
    assert ("cached_self_attention", "cache_0_updated") in named
    assert ("mlp_residual", "doubled") in named
    assert ("mood_strength", "steer_mood") in named
    assert ("steer_mood", "self_attention_layer_norm") in named


def test_any_functional_model_can_be_drawn():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(2, name="dense")(x))
    text = bs.to_mermaid(model)
    assert "dense<br/>Dense" in text
    assert text.count("-->") == 2


def test_missing_dot_says_how_to_get_it(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bs.SurgeryError, match=r"apt install graphviz.*to_mermaid"):
        bs.plot_model(model, str(tmp_path / "model.png"))


@needs_dot
@pytest.mark.parametrize("name", ["model.xyz", "model", "missing/model.png"])
def test_bad_target(model, tmp_path, name):
    with pytest.raises(bs.SurgeryError, match="expected a file in a folder that exists"):
        bs.plot_model(model, str(tmp_path / name))


def test_drawing_changes_nothing(model):
    before = (len(model.layers), [t.name for t in model.inputs])
    bs.to_mermaid(model, expand_nested=True)
    assert (len(model.layers), [t.name for t in model.inputs]) == before
