"""What is in the fields of rewrites comes back from a recipe as it was, or is refused in words."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.conftest import make_gpt2
from tests.test_recipe import Own, Put


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


def test_arrays_under_keys_that_look_alike(gpt2, tmp_path):
    values = {1: np.zeros(2), "1": np.ones(2), "a.b": np.full(3, 2.0), "a": {"b": np.full(3, 4.0)}}
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", values)]), tmp_path / "r")
    found = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert list(found) == list(values)
    for key in (1, "1", "a.b"):
        np.testing.assert_array_equal(found[key], values[key])
    np.testing.assert_array_equal(found["a"]["b"], values["a"]["b"])


def built():
    layer = keras.layers.Dense(32, name="mine")
    layer.build((None, None, 32))
    return layer


def held_elsewhere(gpt2):
    trained = bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)}, trainable=True)]).rewrites[0]
    return [Own("blocks.0", trained)]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda gpt2: [Own("blocks.0", built())], r"rewrites\.0\.values"),
        (held_elsewhere, r"rewrites\.0\.values\.learned"),
        (lambda gpt2: [Put("blocks.1", built()), bs.Remove("blocks.1")], r"rewrites\.0\.layer"),
    ],
)
def test_weights_that_do_not_run_are_refused_by_name(gpt2, tmp_path, make, where):
    edited = bs.operate(gpt2, make(gpt2))
    with pytest.raises(bs.SurgeryError, match=f"{where}': expected a layer that runs in the edite"):
        bs.save_recipe(edited, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_an_unbuilt_layer_that_does_not_run_stays_unbuilt(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", keras.layers.Dense(4))]), tmp_path / "r")
    assert not bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values.built
