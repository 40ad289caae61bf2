"""Layers without weights are made in less time, and are as Keras makes them."""

import keras
import numpy as np
import pytest
from keras import ops

from backbone_surgery import graph
from backbone_surgery.opening.site import Site


@pytest.mark.parametrize("shape", [(None, 3), (2, None, 4), ()])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", None])
def test_an_input_is_that_of_keras(shape, dtype):
    ours = graph.new_input(shape, dtype=dtype, name="x")
    theirs = keras.Input(batch_shape=shape, dtype=dtype, name="x")
    assert (ours.shape, ours.dtype, ours.name) == (theirs.shape, theirs.dtype, theirs.name)
    layer, other = (graph.node_of(t).operation for t in (ours, theirs))
    assert type(layer) is keras.layers.InputLayer
    assert layer.get_config() == other.get_config()
    assert set(vars(layer)) == set(vars(other)) - {"build", "quantize"}


def test_a_model_on_such_an_input_is_saved_and_loaded(tmp_path, rng):
    x = graph.new_input((None, 3), dtype="float32", name="x")
    model = keras.Model(x, keras.layers.Dense(2)(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    values = rng.normal(size=(4, 3)).astype("float32")
    np.testing.assert_array_equal(loaded(values), model(values))


def test_a_site_is_a_layer_as_keras_makes_it():
    class Slow(Site):
        def __new__(cls, *args, **kwargs):
            return keras.layers.Layer.__new__(cls, *args, **kwargs)

        def __init__(self, **kwargs):
            keras.layers.Layer.__init__(self, autocast=False, **kwargs)
            self.built = self.supports_masking = True
            self.role = "query"

    ours, theirs = Site("query", name="x"), Slow(name="x")
    assert set(vars(ours)) == set(vars(theirs)) - {"build", "quantize"}
    differ = {k for k in vars(ours) if vars(ours)[k] != vars(theirs)[k]}
    assert differ == {"_auto_config", "_tracker"}


def test_an_own_layer_still_finds_parts_that_it_is_given():
    site = Site("query")
    site.part = keras.layers.Dense(2)
    site.part.build((None, 3))
    assert [v.name for v in site.weights] == ["kernel", "bias"]


def test_a_layer_that_builds_weights_is_prepared_as_ever():
    class Scale(Site):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.scale

    scale = Scale("query", name="scale")
    assert scale(ops.ones((1, 2, 3))).shape == (1, 2, 3)
    assert [v.path for v in scale.weights] == ["scale/variable"]
