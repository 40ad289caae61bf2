"""Models whose pictures have something to show."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_deep_gpt2, make_gemma, make_gpt2


class Doubled(keras.layers.Layer):
    def call(self, x):
        return x * 2


def steered():
    """Three blocks with caches, a layer between two of them, and steering in the second."""

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return Doubled(name="doubled")(result) if layer.name == "transformer_layer_0" else result

    return bs.rewire(bs.operate(make_deep_gpt2(), [clone_fn, bs.Steer("mood", {1: np.ones(32)})]))


def conditioned():
    """A block that runs twice, a condition, and captured attention patterns."""
    edits = [
        bs.Repeat("blocks.1"),
        bs.Condition("topic", np.ones(32), 0.1, at="blocks.1"),
        bs.Steer("mood", {2: np.ones(32)}, when="topic"),
        bs.Capture("blocks.1.attention_pattern"),
    ]
    return bs.operate(make_deep_gpt2(), edits)


def nested():
    """A model in a model in a model; the middle one is called twice."""

    def residual(name, width=4):
        x = keras.Input((width,))
        return keras.Model(x, keras.layers.Add(name="add")([inside[name](x), x]), name=name)

    inside = {"inner": keras.layers.Dense(4, name="dense")}
    inside["outer"] = residual("inner")
    outer = residual("outer")
    x = keras.Input((4,), name="x")
    y = outer(outer(x))
    return keras.Model(x, [y, keras.layers.Dense(2, name="head")(y)])


MODELS = {
    "steered": steered,
    "conditioned": conditioned,
    "conditioned, with caches": lambda: bs.rewire(conditioned()),
    "nested": nested,
    "gemma": lambda: bs.rewire(make_gemma()),
    "twelve blocks": lambda: bs.rewire(make_gpt2(num_layers=12)),
}


@pytest.fixture(scope="session")
def models():
    """Every model, made when it is first asked for."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = MODELS[name]()
        return made[name]

    return model
