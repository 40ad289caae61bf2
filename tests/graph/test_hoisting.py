"""A part of a tensor is taken before the layers that work on each token alone, not after them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from backbone_surgery import graph
from tests.helpers import relative


class Mean(layers.Layer):
    """Mix all tokens."""

    def call(self, x):
        return x + ops.mean(x, axis=1, keepdims=True)


def first_two(x):
    return x[:, :2]


def by_token(layer, args, kwargs):
    return isinstance(layer, layers.Dense | layers.Add | layers.LayerNormalization)


@pytest.fixture
def stream():
    """Return an input and a stream: a mix of tokens and an MLP, each added to what went in."""
    x = keras.Input((6, 4))
    mixed = Mean(name="mix")(layers.Dense(4, name="value")(layers.LayerNormalization()(x)))
    middle = layers.Add(name="middle")([layers.Dense(4, name="output")(mixed), x])
    hidden = layers.Dense(8, activation="relu", name="hidden")(layers.LayerNormalization()(middle))
    return x, layers.Add(name="end")([layers.Dense(4, name="down")(hidden), middle])


def tokens_of(model):
    return {n.operation.name: n.outputs[0].shape[1] for n in graph.graph_nodes(model)}


def test_what_works_on_each_token_runs_for_those_taken_alone(stream, rng):
    x, y = stream
    model = keras.Model(x, graph.hoist(y, first_two, by_token))
    tokens = tokens_of(model)
    assert {n for n, count in tokens.items() if count == 2} >= {"output", "middle", "hidden", "end"}
    assert tokens["value"] == tokens["mix"] == 6
    takes = [n for n in graph.graph_nodes(model) if "get_item" in n.operation.name]
    assert len(takes) == 2  # of the mix, and of the input once, which two layers use
    values = rng.normal(size=(3, 6, 4)).astype("float32")
    wanted = keras.Model(x, y).predict(values, verbose=0)[:, :2]
    assert relative(model.predict(values, verbose=0), wanted) <= 1e-6


def test_a_layer_that_does_not_pass_is_run_whole(stream, rng):
    x, y = stream
    hoisted = graph.hoist(y, first_two, lambda *call: False)
    model = keras.Model(x, hoisted)
    assert tokens_of(model)["end"] == 6
    assert hoisted.shape == (None, 2, 4)


def test_the_graph_itself_stays(stream, rng):
    x, y = stream
    model = keras.Model(x, y)
    values = rng.normal(size=(3, 6, 4)).astype("float32")
    before = model.predict(values, verbose=0)
    graph.hoist(y, first_two, by_token)
    np.testing.assert_array_equal(keras.Model(x, y).predict(values, verbose=0), before)
    assert tokens_of(keras.Model(x, y))["end"] == 6


def test_an_input_is_taken_from(rng):
    x = keras.Input((6, 4))
    assert graph.hoist(x, first_two, by_token).shape == (None, 2, 4)
