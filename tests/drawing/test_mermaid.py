"""Mermaid text is the same graph as the picture."""

import re

import keras
import pytest

import backbone_surgery as bs
from backbone_surgery.drawing.picture import make_picture
from tests.drawing.conftest import MODELS


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_text_holds_the_nodes_frames_and_arrows(models, name, expand):
    model = models(name)
    picture = make_picture(model, expand)
    text = bs.to_mermaid(model, expand_nested=expand)
    assert text.startswith("flowchart TD\n")
    labels = dict(re.findall(r'^\s+(n\d+)[\[(]+"(.*)<br/>', text, re.M))
    assert labels == {f"n{i}": node.name for i, node in enumerate(picture.nodes)}
    links = [(int(a), int(b)) for a, b in re.findall(r"n(\d+) --> n(\d+)", text)]
    assert links == picture.edges
    assert re.findall(r'subgraph s\d+\["(.*)"\]', text) == [f.name for f in picture.frames]
    assert text.count("subgraph") == len(re.findall(r"^ +end$", text, re.M))


def test_any_functional_model_can_be_drawn():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(2, name="dense")(x))
    lines = bs.to_mermaid(model).splitlines()
    assert '    n1["dense<br/>Dense"]' in lines
    assert [line for line in lines if "-->" in line] == ["    n0 --> n1", "    n1 --> n2"]


def test_names_cannot_break_the_text():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(2, name='a "b" <c> #d')(x))
    assert 'n1["a #34;b#34; #60;c#62; #35;d<br/>Dense"]' in bs.to_mermaid(model)
