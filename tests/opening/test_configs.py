"""Keras asks for configs to save, pickle and clone a model: edits have none, and say so."""

import copy
import pickle

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2

WAYS = {
    "save": lambda model, folder: model.save(folder / "model.keras"),
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.dumps(model),
    "clone": lambda model, folder: keras.models.clone_model(model),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [lambda edited: edited, bs.rewire], ids=["edited", "rewired"])
def test_what_keras_cannot_rebuild(tmp_path, make, way):
    model = make(bs.operate(make_gpt2(num_layers=1), []))
    with pytest.raises(
        bs.SurgeryError, match=r"get_config at .* shares the layers of its backbone"
    ):
        WAYS[way](model, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_task_is_saved_by_keras_unless_it_is_edited(tmp_path):
    backbone, file = make_gpt2(num_layers=1), tmp_path / "model.keras"
    bs.CachedCausalLM(backbone).save(file)
    saved = file.read_bytes()
    for variable, same in zip(
        keras.models.load_model(file, compile=False).weights, backbone.weights, strict=True
    ):
        np.testing.assert_array_equal(variable, same)
    with pytest.raises(bs.SurgeryError, match="Save a `CachedCausalLM` of it with `save_to_pre"):
        bs.CachedCausalLM(bs.operate(backbone, [bs.Ablate("blocks.0")])).save(file)
    assert file.read_bytes() == saved


@pytest.mark.slow
def test_a_clone_that_shares_the_layers():
    edited = bs.operate(make_gpt2(num_layers=2), [bs.Remove("blocks.1")])
    rows = {"token_ids": np.ones((1, 3), "int32"), "padding_mask": np.ones((1, 3), "int32")}
    clone = keras.models.clone_model(edited, clone_function=lambda layer: layer)
    np.testing.assert_array_equal(clone(rows), edited(rows))
