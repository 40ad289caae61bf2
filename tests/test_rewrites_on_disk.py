"""A recipe keeps every rewrite, trained weights included."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.conftest import make_gpt2
from tests.numpy_models import weights_of
from tests.reference import run, tokens


def edits(rng):
    mean = rng.normal(size=(4, 8)).astype("float32")
    path = "blocks.0.attention"
    return [
        bs.Repeat("blocks.1", times=2),
        bs.Reorder((0, 2, 1, 3)),
        bs.Remove("blocks.3"),
        bs.Ablate(path, heads=(2,), to="mean", values={path: mean}),
        bs.Patch("blocks.0", positions=(1,)),
        bs.Insert("blocks.1.mlp_output", keras.layers.Dense(32, name="extra")),
        bs.Replace("blocks.2.mlp_hidden", keras.layers.Dense(64, name="other")),
        bs.LowRank("blocks.*.query", rank=2, alpha=4),
        bs.Skip("blocks.1", amount=0.5),
        bs.Capture("blocks.*", name="seen"),
    ]


def test_every_rewrite_comes_back(tmp_path, rng):
    backbone = make_gpt2()
    edited = bs.operate(backbone, edits(rng))
    for variable in edited.trainable_variables:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    bs.save_recipe(edited, tmp_path / "edit.safetensors")
    again = bs.load_recipe(tmp_path / "edit.safetensors", backbone)
    inputs = tokens(rng)
    assert [type(r) for r in again.rewrites] == [type(r) for r in edited.rewrites]
    assert np.array_equal(run(again, inputs), run(edited, inputs))
    assert {v.shape for v in again.trainable_variables} == {
        v.shape for v in edited.trainable_variables
    }
    adapter = again.rewrites[7].adapters["blocks.0.query"]
    wanted = edited.rewrites[7].adapters["blocks.0.query"]
    assert adapter is not wanted
    for got, value in zip(weights_of(adapter), weights_of(wanted), strict=True):
        assert np.array_equal(got, value)


def test_a_function_has_no_description(tmp_path):
    class Through(keras.layers.Layer):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def call(self, x):
            return self.block(x)

    edited = bs.operate(make_gpt2(), [bs.Wrap("blocks.0", Through)])
    with pytest.raises(bs.SurgeryError, match="which has no description"):
        bs.save_recipe(edited, tmp_path / "edit.safetensors")


def test_depth_comes_before_what_watches_a_block():
    watch = bs.Condition("seen", vector=np.ones(32, "float32"), at="blocks.0", threshold=0.0)
    with pytest.raises(bs.SurgeryError, match=r"captures or watches nothing yet.* Received seen"):
        bs.operate(make_gpt2(), [watch, bs.Remove("blocks.1")])
