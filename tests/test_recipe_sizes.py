"""Sizes that a recipe claims are checked before they take memory, whoever wrote its digests.

They are such that no machine has the memory: allocating them would fail in other words.
"""

import json
import tracemalloc

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.weights.store import read_recipe
from tests.conftest import make_gpt2
from tests.test_recipe import Own, Put
from tests.test_recipe_values import changed

HUGE = 10**13
FIELDS = ("rewrites", 0, "fields")


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


@keras.saving.register_keras_serializable("tests")
class Early(keras.layers.Layer):
    """Make weights before anything is built, and count how often."""

    count = 0

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        Early.count += 1
        self.size = size
        self.vector = self.add_weight(shape=(size,), initializer="glorot_uniform")

    def call(self, x):
        return x + self.vector[0]

    def get_config(self):
        return {**super().get_config(), "size": self.size}


def refuse(gpt2, path, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.load_recipe(path, gpt2)
    # Keras gives memory to what was made in such a scope when it ends: here, to nothing.
    with keras.StatelessScope():
        keras.layers.Dense(2).build((None, 2))


def test_a_layer_that_makes_its_weights_at_once(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Put("blocks.0", Early(8))]), tmp_path / "r")
    before = Early.count
    with pytest.raises(bs.RecipeError, match="weights of the digest"):
        bs.load_recipe(tmp_path / "r", make_gpt2(seed=1))
    assert Early.count == before
    changed(tmp_path / "r", HUGE, "layers", 0, "config", "size")
    refuse(gpt2, tmp_path / "r", rf"at most 1024 numbers.* shape \({HUGE},\)")


def test_a_layer_that_no_rewrite_runs(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", keras.layers.Dense(4))]), tmp_path / "r")
    huge = keras.saving.serialize_keras_object(Early(3))
    huge["config"]["size"] = HUGE
    changed(tmp_path / "r", huge, "layers", 0)
    refuse(gpt2, tmp_path / "r", rf"at most 1024 numbers.* shape \({HUGE},\)")


LAYERS = {
    "dense": (keras.layers.Dense, "units"),
    "einsum": (lambda units: keras.layers.EinsumDense("btd,de->bte", (None, units)), None),
    "recurrent": (lambda units: keras.layers.GRU(units, return_sequences=True), "units"),
    "convolution": (lambda units: keras.layers.Conv1D(units, 1), "filters"),
    "decoder": (
        lambda units: keras_hub.layers.TransformerDecoder(units, 2),
        "intermediate_dim",
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_the_edit_builds(gpt2, tmp_path, kind):
    make, field = LAYERS[kind]
    layer = keras.Sequential([make(4), keras.layers.Dense(32)])
    bs.save_recipe(bs.operate(gpt2, [bs.Insert("blocks.0", layer)]), tmp_path / "r")
    bs.load_recipe(tmp_path / "r", gpt2)
    place = ("layers", 0, "config", "layers", 1, "config")
    field, value = (field, HUGE) if field else ("output_shape", [None, HUGE])
    changed(tmp_path / "r", value, *place, field)
    refuse(gpt2, tmp_path / "r", r"at most 1024 numbers.* shape \(.*0{12}.*\)")


@pytest.mark.parametrize("rank", [32, 10**6])
def test_the_rank_of_lora(tmp_path, rank):
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(32)})])
    backbone.enable_lora(2)
    bs.save_recipe(edited, tmp_path / "r")
    changed(tmp_path / "r", rank, "base", "lora", "rank", keep="owner.")
    fresh = make_gpt2()
    words = rf"lora_kernel_.' *.*at most 1024 numbers.* shape \(.*{rank}.*\)"
    refuse(fresh, tmp_path / "r", words)
    assert not any("lora" in v.path for v in fresh.weights)


def test_the_rank_of_a_low_rank_rewrite(gpt2, tmp_path):
    edited = bs.operate(gpt2, [bs.LowRank("blocks.*.query", rank=2)])
    bs.save_recipe(edited, tmp_path / "r")
    changed(tmp_path / "r", HUGE, "layers", 0, "config", "rank")
    refuse(gpt2, tmp_path / "r", r"at most 1024 numbers.* shape \(.*0{12}.*\)")


@pytest.mark.parametrize(
    "rewrite", [bs.Repeat("blocks.1", times=2), bs.Reorder([1, 0, 1])], ids=["repeat", "reorder"]
)
def test_the_number_of_blocks(gpt2, tmp_path, rewrite):
    bs.save_recipe(bs.operate(gpt2, [rewrite]), tmp_path / "r")
    if isinstance(rewrite, bs.Repeat):
        changed(tmp_path / "r", HUGE, *FIELDS, "times")
    else:
        changed(tmp_path / "r", {"list": [0] * 100_000}, *FIELDS, "blocks")
    refuse(gpt2, tmp_path / "r", "expected at most 1000 blocks to run. Received 10000")


def test_a_list_of_positions_takes_no_more_than_itself(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [bs.Patch("blocks.*", (1, 2))]), tmp_path / "r")
    positions = {"tuple": list(range(100_000))}
    changed(tmp_path / "r", positions, *FIELDS, "positions")
    tracemalloc.start()
    bs.load_recipe(tmp_path / "r", gpt2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 * 32 * 4


def test_an_array_is_asked_for_once(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", [np.ones(4)])]), tmp_path / "r")
    many = {"list": [{"array": "rewrites.0.values.0"}] * 1000}
    changed(tmp_path / "r", many, *FIELDS, "values")
    refuse(
        gpt2, tmp_path / "r", r"an array that nothing else holds. Received 'rewrites.0.values.0'"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: [keras.layers.Dense(4), keras.layers.Normalization()],
        lambda: [keras.layers.Dense(4), keras.layers.Normalization(mean=0.0, variance=1.0)],
        lambda: [keras.layers.GRU(4, return_sequences=True)],
    ],
    ids=["adapted", "given", "recurrent"],
)
def test_what_computes_with_its_weights_while_it_is_built(gpt2, tmp_path, make):
    layer = keras.Sequential([*make(), keras.layers.Dense(32)])
    bs.save_recipe(bs.operate(gpt2, [bs.Insert("blocks.0", layer)]), tmp_path / "r")
    changed(tmp_path / "r", HUGE, "layers", 0, "config", "layers", 1, "config", "units")
    refuse(gpt2, tmp_path / "r", r"at most 1024 numbers.* shape \(.*0{12}.*\)")


def test_a_backbone_is_no_layer_of_a_recipe(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", keras.layers.Dense(4))]), tmp_path / "r")
    config = keras.saving.serialize_keras_object(make_gpt2())
    changed(tmp_path / "r", {"config": config}, "layers", 0)
    refuse(gpt2, tmp_path / "r", "expected a layer that is built into Keras or KerasHub")


def test_long_lists_of_nonsense_are_refused_at_the_first(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", 1)]), tmp_path / "r")
    document = json.loads((tmp_path / "r" / "recipe.json").read_text())
    value = {"list": [{"list": [{"x": 0}] * 50}] * 2000}
    document["rewrites"][0]["fields"]["values"] = value
    (tmp_path / "r" / "recipe.json").write_text(json.dumps(document))
    tracemalloc.start()
    refuse(gpt2, tmp_path / "r", "expected what the schema of recipes says")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


# What cannot be checked so is refused when it is saved.


@keras.saving.register_keras_serializable("tests")
class OfArray(keras.layers.Layer):
    """Make a variable out of an array, at once or when built."""

    def __init__(self, at_once, **kwargs):
        super().__init__(**kwargs)
        self.at_once = at_once
        if at_once:
            self.vector = keras.Variable(np.ones(32))

    def build(self, shape):
        if not self.at_once:
            self.vector = keras.Variable(np.ones(shape[-1]))

    def call(self, x):
        return x + self.vector

    def get_config(self):
        return {**super().get_config(), "at_once": self.at_once}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_variable_made_out_of_an_array(gpt2, tmp_path, at_once):
    edited = bs.operate(gpt2, [Put("blocks.0", OfArray(at_once))])
    with pytest.raises(bs.SurgeryError, match=r"that makes its weights by `add_weight`.*'of_array"):
        bs.save_recipe(edited, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_what_a_recipe_loads_is_there(gpt2, tmp_path):
    """Weights that got their memory late are weights like any other."""
    layer = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(32)])
    edited = bs.operate(gpt2, [bs.Insert("blocks.0", layer)])
    bs.save_recipe(edited, tmp_path / "r")
    again = bs.load_recipe(tmp_path / "r", gpt2)
    _, arrays = read_recipe(tmp_path / "r")
    assert sorted(a.shape for a in arrays.values()) == [(32,), (32, 32)]
    x = {"token_ids": np.ones((2, 4), int), "padding_mask": np.ones((2, 4), int)}
    np.testing.assert_array_equal(again.predict_on_batch(x), edited.predict_on_batch(x))
    assert not np.array_equal(again(x, training=True), again(x, training=True))
