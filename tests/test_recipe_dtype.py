"""Recipes: layers that a rewrite makes come back in the dtype policy that they were made under."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.conftest import make_gpt2
from tests.test_recipe import outputs


@bs.register_rewrite(package="tests")
@dataclass(frozen=True)
class Product(bs.SiteRewrite):
    """Put in a layer that is told no dtype."""

    at: str = "blocks.0"

    def apply(self, x, place, surgery):
        return keras.ops.cast(keras.layers.Dense(32, kernel_initializer="ones")(x), x.dtype)


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def test_layers_that_a_rewrite_makes_keep_the_policy_they_were_made_under(tmp_path, policy):
    gpt2 = make_gpt2()
    policy("mixed_bfloat16")
    edited = bs.operate(gpt2, [Product()])
    wanted = outputs(edited)
    bs.save_recipe(edited, tmp_path / "r")
    policy("float32")
    loaded = bs.load_recipe(tmp_path / "r", gpt2)
    assert loaded.made_under == ("mixed_bfloat16",)
    assert keras.config.dtype_policy().name == "float32"
    np.testing.assert_array_equal(outputs(loaded), wanted)
    assert not np.array_equal(outputs(bs.operate(gpt2, [Product()])), wanted)
    both = bs.operate(loaded, [Product("blocks.1")])
    with pytest.raises(bs.SurgeryError, match=r"one global dtype policy.*_bfloat16, float32\."):
        bs.save_recipe(both, tmp_path / "both")
    assert not (tmp_path / "both").exists()
