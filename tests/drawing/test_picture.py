"""Pictures hold the nodes, frames and arrows of the graph, and leave the graph as it was."""

import keras
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.drawing.picture import make_picture
from tests.drawing.conftest import MODELS
from tests.helpers import make_gpt2


class Own(keras.layers.Layer):
    def call(self, x):
        return x


def arrows(picture, *names):
    """Return the arrows between named nodes, as names with the index of their frame."""
    label = [f"{n.name}@{n.frame}" if n.frame is not None else n.name for n in picture.nodes]
    return [
        (label[a], label[b])
        for a, b in picture.edges
        if {picture.nodes[a].name, picture.nodes[b].name} <= set(names) or not names
    ]


def test_nested_models_are_frames_in_frames_once_for_each_use(models):
    picture = make_picture(models("nested"), True)
    assert [(f.name, f.parent) for f in picture.frames] == [
        ("outer", None),
        ("inner", 0),
        ("outer", None),
        ("inner", 2),
    ]
    assert sorted(arrows(picture)) == sorted(
        [
            ("x", "dense@1"),
            ("x", "add@1"),
            ("x", "add@0"),
            ("dense@1", "add@1"),
            ("add@1", "add@0"),
            ("add@0", "dense@3"),
            ("add@0", "add@3"),
            ("add@0", "add@2"),
            ("dense@3", "add@3"),
            ("add@3", "add@2"),
            ("add@2", "head"),
            ("add@2", "0_output"),
            ("head", "1_output"),
        ]
    )


def test_collapsed_models_are_one_node_for_each_use(models):
    picture = make_picture(models("nested"), False)
    assert [n.name for n in picture.nodes] == [
        "x",
        "outer",
        "outer",
        "head",
        "0_output",
        "1_output",
    ]
    assert picture.edges == [(0, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
    assert [n.kind for n in picture.nodes] == ["input", "block", "block", "layer"] + ["output"] * 2


def test_arrows_go_past_sites_and_the_inputs_of_blocks(models):
    picture = make_picture(models("steered"), True)
    names = {n.name for n in picture.nodes}
    assert not [n for n in names if n.startswith(("site_", "block_input"))]
    assert not [n for n in picture.nodes if n.frame is not None and n.kind == "input"]
    links = arrows(picture)
    for link in [
        ("cache_0", "cached_self_attention@0"),
        ("cached_self_attention@0", "cache_0_updated"),
        ("mlp_residual@0", "doubled"),
        ("doubled", "attention_residual@1"),
        ("mood_strength", "steer_mood@1"),
        ("steer_mood@1", "self_attention_layer_norm@2"),
    ]:
        assert link in links
    kinds = {n.name: n.kind for n in picture.nodes}
    assert kinds["doubled"] == kinds["steer_mood"] == kinds["scale_mood"] == "inserted"
    assert kinds["cached_self_attention"] == "stateful"
    assert "SelfAttention" in {n.description for n in picture.nodes}
    assert kinds["cache_1"] == kinds["cache_1_updated"] == "cache"


def inserted(model):
    return [n.name for n in make_picture(model, True).nodes if n.kind == "inserted"]


def test_layers_that_surgery_added_are_told_from_the_others():
    def drop(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        if layer.name == "layer_norm":
            return keras.layers.Dropout(0.1, name="dropped")(result)
        return result

    def swap(layer, *args, **kwargs):
        return Own(name=layer.name)(*args) if layer.name == "layer_norm" else layer(*args, **kwargs)

    backbone = make_gpt2()
    dense = keras.layers.Dense(32, name="adapter")
    edited = bs.operate(backbone, [drop, bs.Insert("blocks.0.mlp_output", dense)])
    again = bs.operate(edited, [bs.Capture("blocks.*")])
    for model in (edited, again, bs.rewire(again)):
        assert inserted(model) == ["adapter", "dropped"]
    swapped = bs.operate(backbone, [swap])
    assert inserted(swapped) == inserted(bs.rewire(swapped)) == ["layer_norm"]
    assert not inserted(backbone)
    assert not inserted(bs.rewire(backbone))
    x = keras.Input((4,))
    assert not inserted(keras.Model(x, Own()(x)))


def test_layers_put_in_by_hand_are_told_by_their_class():
    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return Own(name="own")(result) if layer.name == "layer_norm" else result

    backbone = make_gpt2()
    model = keras.Model(
        backbone.input, bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    )
    assert inserted(bs.rewire(model)) == ["own"]
    steered = bs.operate(model, [bs.Insert("blocks.1", keras.layers.Dense(32, name="dense"))])
    assert inserted(steered) == ["dense", "own"]


def test_a_sequential_model_is_drawn():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    assert [n.name for n in make_picture(model, False).nodes][1] == "dense"


def test_the_two_uses_of_a_repeated_block_have_arrows_of_their_own(models):
    picture = make_picture(models("conditioned"), True)
    assert [f.name for f in picture.frames][1:3] == [
        "transformer_layer_1",
        "transformer_layer_1_use_1",
    ]
    links = arrows(picture, "mlp_residual", "attention_residual")
    assert ("mlp_residual@1", "attention_residual@2") in links
    assert ("mlp_residual@2", "attention_residual@2") not in links


def test_the_state_of_a_condition_is_a_cache(models):
    model = models("conditioned, with caches")
    picture = make_picture(model, True)
    caches = [n.name for n in picture.nodes if n.kind == "cache"]
    count = len(model.input["cache"])
    assert sorted(caches) == sorted(
        f"cache_{i}{ending}" for i in range(count) for ending in ("", "_updated")
    )
    links = [(a.split("@")[0], b.split("@")[0]) for a, b in arrows(picture)]
    (own,) = (a for a, b in links if b == "cached_condition_topic" and a in caches)
    assert ("cached_condition_topic", f"{own}_updated") in links
    arrays = model.input["cache"][int(own.removeprefix("cache_"))]
    assert picture.nodes[[n.name for n in picture.nodes].index(own)].description == ", ".join(
        arrays
    )
    assert set(arrays) & {"key", "value"} == set()


def test_what_keeps_state_is_told_by_its_methods_and_not_by_its_name():
    x = keras.Input((4, 8), name="x")
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    nodes = make_picture(keras.Model(x, attention(x, x)), True).nodes
    assert {n.name: n.kind for n in nodes}["attention"] == "layer"


def test_every_node_tells_the_shapes_that_it_gives(models):
    model = models("steered")
    nodes = {n.name: n for n in make_picture(model, False).nodes}
    assert nodes["token_ids"].shapes == ("int32[?, ?]",)
    assert nodes["cache_update_index"].shapes == ("int32[]",)
    assert nodes["cache_0"].shapes == ("float32[?, ?, 4, 8]",)
    assert nodes["cache_0"].description == ", ".join(model.input["cache"][0])
    assert nodes["hidden_states_output"].shapes == ("float32[?, ?, 32]",)


@pytest.mark.parametrize("name", list(MODELS))
def test_drawing_adds_nothing_to_the_graph(models, name):
    """Layers are shared: a node too many on one would live as long as the backbone."""
    model = models(name)

    def count():
        layers = {id(node.operation): node.operation for node in graph.all_nodes(model)}
        return {key: len(layer._inbound_nodes) for key, layer in layers.items()}

    before = count()
    bs.to_mermaid(model, expand_nested=True)
    make_picture(model, False)
    assert count() == before


def test_only_graphs_can_be_drawn():
    with pytest.raises(bs.SurgeryError, match=r"expected a Functional model\. Received Dense"):
        bs.to_mermaid(keras.layers.Dense(2))
