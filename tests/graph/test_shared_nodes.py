"""Graphs that are built over shared layers go with their last user, and nothing else goes.

`Node` objects are counted: Keras makes one for each call of a layer, and whoever holds one holds
the graph above it.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.graph.building import building
from backbone_surgery.graph.shared_nodes import SharedNodes
from tests.helpers import make_gpt2


def call(layer, *args, **kwargs):
    return layer(*args, **kwargs)


def living_nodes():
    gc.collect()
    return sum(isinstance(thing, keras.src.ops.node.Node) for thing in gc.get_objects())


class TwoOutputs(layers.Layer):
    def call(self, x):
        return x + 1, x * 2


@pytest.fixture
def source():
    """A model with a shared layer, a nested model, a raw operation and two outputs of one layer."""
    x = keras.Input((3,), name="x")
    dense = layers.Dense(3, name="dense")
    nested = keras.Sequential([layers.Dense(3, name="inner")], name="nested")
    first, second = TwoOutputs(name="two")(nested(dense(dense(x))))
    return keras.Model(x, first * second, name="source")


def clone(model, clone_fn=call):
    return keras.Model(model.input, bs.clone_layer_graph(model.input, model.output, clone_fn))


def nodes_of(model):
    return [list(op._inbound_nodes) for op in model.operations]


VALUE = np.array([[1, -2, 3]], "float32")


@pytest.mark.slow
def test_clones_that_are_dropped_leave_no_nodes_behind(source):
    clone(source)
    before, numbers = nodes_of(source), living_nodes()
    for _ in range(5):
        clone(source, lambda layer, *args: layers.ReLU()(layer(*args)) if len(args) else None)
    assert living_nodes() == numbers
    assert nodes_of(source) == before


@pytest.mark.slow
def test_failed_clones_and_calls_that_are_not_used_leave_no_nodes_behind(source):
    def fail(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        layer(*args, **kwargs)
        if layer.name == "two":
            raise ZeroDivisionError
        return result

    clone(source)
    before = living_nodes()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            clone(source, fail)
    assert living_nodes() == before


@pytest.mark.slow
def test_layers_of_the_users_own_that_clones_use_again_and_again_let_go(source):
    mine = layers.Dense(3, name="mine")
    outer = layers.Dense(3, name="outer")(source.input)

    def add(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return mine(result) + outer if layer.name == "dense" else result

    clone(source, add)
    before = living_nodes()
    for _ in range(3):
        clone(source, add)
    assert living_nodes() == before


BUILDS = {
    "open": lambda b, e: bs.open_backbone(b),
    "operate": lambda b, e: bs.operate(b, [bs.Steer("mood", {1: np.ones(32)})]),
    "operate on an edited backbone": lambda b, e: bs.operate(e, [bs.Capture("blocks.*")]),
    "repeat": lambda b, e: bs.operate(b, [bs.Repeat("blocks.0")]),
    "rewire": lambda b, e: bs.rewire(e),
    "task": lambda b, e: bs.CachedCausalLM(e),
    "nested": lambda b, e: bs.rewrite_nested(b, "token_embedding", call),
    "picture": lambda b, e: make_picture(e, True),
}


@pytest.fixture(scope="module")
def backbone():
    return make_gpt2(num_layers=2)


@pytest.fixture(scope="module")
def edited(backbone):
    return bs.operate(backbone, [bs.Steer("calm", {0: np.ones(32)})])


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_what_is_built_of_a_backbone_and_dropped_leaves_no_nodes_behind(build, backbone, edited):
    build(backbone, edited)
    before = living_nodes()
    listed = [len(op._inbound_nodes) for op in backbone.operations]
    for _ in range(2):
        build(backbone, edited)
    assert living_nodes() == before
    assert [len(op._inbound_nodes) for op in backbone.operations] == listed


@pytest.mark.slow
def test_what_is_measured_of_a_task_leaves_no_nodes_behind(backbone):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    pairs = [("a good day", "a bad day"), ("a happy cat", "a sad cat")]
    for measure in (
        lambda: bs.logit_lens(lm, "Once upon"),
        lambda: bs.ControlVector.train(lm, pairs),
        lambda: bs.check(backbone),
    ):
        measure()
        before = living_nodes()
        measure()
        assert living_nodes() == before


@pytest.mark.slow
def test_a_dropped_edit_takes_the_layers_it_made_with_it(backbone):
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(32)})])
    blocks = [n.operation for n in graph.all_nodes(edited) if "block" in n.operation.name]
    gone = [weakref.ref(thing) for thing in (edited, *blocks) if thing not in backbone.layers]
    assert len(gone) > 3
    del edited, blocks
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


# What must not go.


@pytest.mark.slow
def test_tensors_alone_keep_a_graph(source):
    output = bs.clone_layer_graph(source.input, source.output, call)
    gc.collect()
    np.testing.assert_array_equal(keras.Model(source.input, output)(VALUE), source(VALUE))
    inner = graph.node_of(output).input_tensors[0]
    del output
    gc.collect()
    assert keras.Model(source.input, inner)(VALUE).shape == (1, 3)


def test_nodes_of_the_users_own_stay_with_their_layer(source):
    clone(source)
    dense, x = source.get_layer("dense"), source.input
    count = len(dense._inbound_nodes)
    dense(x)
    own = weakref.ref(dense._inbound_nodes[-1])
    clone(source)
    gc.collect()
    assert own() is dense._inbound_nodes[count]
    assert dense.output is dense._inbound_nodes[0].outputs[0]


def test_a_graph_is_kept_by_what_a_user_builds_on_it(source):
    cloned = clone(source)
    probe = layers.Dense(1)
    longer = keras.Model(source.input, probe(cloned.output))
    expected = probe(source(VALUE))
    del cloned
    gc.collect()
    np.testing.assert_allclose(longer(VALUE), expected, rtol=1e-6)
    again = keras.Model(source.input, probe.input)
    np.testing.assert_array_equal(again(VALUE), source(VALUE))


@pytest.mark.slow
@pytest.mark.parametrize("kept", range(4))
def test_a_graph_between_others_that_are_gone_is_whole(source, kept):
    clones = [clone(source) for _ in range(4)]
    cloned = clones[kept]
    config, numbers = cloned.get_config(), np.asarray(cloned(VALUE))
    del clones
    gc.collect()
    assert cloned.get_config() == config
    rebuilt = keras.Model.from_config(config, {"TwoOutputs": TwoOutputs})
    rebuilt.set_weights(cloned.get_weights())
    middle = cloned.get_layer("two")
    (node,) = [n for n in graph.graph_nodes(cloned) if n.operation is middle]
    half = keras.Model(cloned.input, node.outputs)
    copy = keras.models.clone_model(cloned)
    copy.set_weights(cloned.get_weights())
    for model in (cloned, rebuilt, copy, clone(cloned), clone(source)):
        np.testing.assert_array_equal(model(VALUE), numbers)
    first, second = half(VALUE)
    np.testing.assert_array_equal(first * second, numbers)


def test_summary_and_picture_show_one_graph_beside_dropped_ones(source):
    def lines(model):
        found = []
        model.summary(print_fn=lambda text, **_: found.append(text), line_length=120)
        return found

    def drawn(model):
        return keras.utils.model_to_dot(model, expand_nested=True).to_string()

    pytest.importorskip("pydot")
    clones = [clone(source) for _ in range(3)]
    alone = [drawn(clones[1]), lines(clones[1]), drawn(source), lines(source)]
    kept = clones[1]
    del clones
    gc.collect()
    assert [drawn(kept), lines(kept), drawn(source), lines(source)] == alone
    del kept
    gc.collect()
    assert [drawn(source), lines(source)] == alone[2:]


@pytest.mark.slow
def test_layer_whose_first_node_is_gone_still_tells_how_many_outputs_it_has():
    two, x = TwoOutputs(), keras.Input((3,))

    @building()
    def build():
        graph.share(two)
        return keras.Model(x, two(x))

    dropped, kept = build(), build()
    del dropped
    gc.collect()
    assert len(two._inbound_nodes) == 2
    later = build()
    for model in (kept, later):
        first, second = model(VALUE)
        np.testing.assert_array_equal(first, VALUE + 1)
        np.testing.assert_array_equal(second, VALUE * 2)


@pytest.mark.slow
def test_layers_are_what_they_were(backbone, edited):
    assert edited.get_layer("token_embedding") is backbone.token_embedding
    assert edited.layers
    assert backbone.get_config() == type(backbone).from_config(backbone.get_config()).get_config()
    hidden = backbone.transformer_layers[0](backbone.token_embedding(np.array([[1, 2]])))
    assert hidden.shape == (1, 2, 32)


# The list itself.


def test_shared_nodes_act_as_the_list_that_they_stand_for():
    layer, x = layers.Dense(2), keras.Input((3,))
    outputs = [layer(x), layer(x)]
    plain = list(layer._inbound_nodes)
    graph.share(layer)
    nodes = layer._inbound_nodes
    assert isinstance(nodes, SharedNodes)
    assert (len(nodes), bool(nodes), list(nodes)) == (2, True, plain)
    assert (nodes[0], nodes[-1], nodes[:1]) == (plain[0], plain[1], plain[:1])
    assert [nodes.index(node) for node in plain] == [0, 1]
    assert plain[1] in nodes
    assert list(reversed(nodes)) == plain[::-1]
    with pytest.raises(IndexError):
        nodes[2]
    with pytest.raises(ValueError, match="not among these nodes"):
        nodes.index(None)
    assert not SharedNodes()
    assert layer.output is outputs[0]


@pytest.mark.slow
def test_numbers_of_nodes_do_not_move_while_a_later_one_lives():
    layer, x = layers.Dense(2), keras.Input((3,))
    graph.share(keras.Model(x, layer(x)))
    nodes = layer._inbound_nodes
    with building():
        first, second = layer(x), layer(x)
    node = graph.node_of(second)
    del first
    gc.collect()
    assert (len(nodes), nodes.index(node), nodes[2]) == (3, 2, node)
    assert (nodes[1].outputs[0].shape, nodes[1].input_tensors) == ((None, 2), [])
    del second, node
    gc.collect()
    assert len(nodes) == 1
    with building():
        third = layer(x)
    assert graph.node_of(third) is nodes[1]
