"""What measures a model leaves its weights where they are, for other threads to generate with."""

from unittest import mock

import jax
import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.opening.predict import SharedPrograms, predict
from tests.families import make_gpt2

compile_ = jax.stages.Lowered.compile
TEXT, OTHER = [1, 2, 3, 4], [1, 5, 3, 4]
MEASURES = {
    "check": lambda lm: bs.check(lm.opened),
    "logit lens": lambda lm: bs.logit_lens(lm, TEXT),
    "patch grid": lambda lm: bs.patch_grid(lm, TEXT, OTHER, metric=(7, 8), at="blocks.*"),
    "attribution": lambda lm: bs.attribution(lm, TEXT, target=7, at="blocks.*"),
    "training": lambda lm: bs.ControlVector.train(lm, [(TEXT, OTHER), (OTHER, TEXT)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_measuring_does_not_take_the_weights_away(name):
    lm = bs.CachedCausalLM(make_gpt2())
    weights = [v.value for v in lm.backbone.variables]
    MEASURES[name](lm)
    assert not any(value.is_deleted() for value in weights)


def test_rows_longer_than_the_positions_are_refused():
    """As by the backbone itself; positions past the end would count as the last one."""
    lm = bs.CachedCausalLM(make_gpt2(max_sequence_length=20))
    long = {"token_ids": np.ones((1, 21), "int32"), "padding_mask": np.ones((1, 21), "int32")}
    for call in (lm.opened, lm, lm.predict_on_batch):
        with pytest.raises(ValueError, match=r"rows of at most 20 tokens.* Received 21"):
            call(long)
    for call in (
        lambda: bs.logit_lens(lm, [1] * 21),
        lambda: bs.ControlVector.train(lm, [([1] * 21, TEXT), (TEXT, [1] * 21)]),
    ):
        with pytest.raises(
            bs.SurgeryError, match=r"texts of at most 20 tokens.* Received one of 2"
        ):
            call()
    pairs = [(TEXT * 5, OTHER * 5), (OTHER * 5, TEXT * 5)]  # as many tokens as there are positions
    assert bs.ControlVector.train(lm, pairs)


def affine(constant):
    x = keras.Input((3,))
    return keras.Model(x, keras.layers.Dense(3, bias_initializer="normal")(x) + constant)


def test_models_that_are_alike_share_a_program_but_for_their_weights(rng):
    same, other = np.arange(3, dtype="float32"), np.arange(3, dtype="float32") + 0.5
    models = [affine(same), affine(same), affine(other)]
    programs, x = SharedPrograms(), rng.normal(size=(2, 3)).astype("float32")
    with mock.patch.object(jax.stages.Lowered, "compile", autospec=True) as compiled:
        compiled.side_effect = compile_
        for model, constant in zip(models, (same, same, other), strict=True):
            for _ in range(2):
                kernel, bias = (np.asarray(w) for w in model.weights)
                wanted = x @ kernel + bias + constant
                assert np.allclose(predict(model, x, programs), wanted, atol=1e-6)
                model.weights[0].assign(kernel + 1)
    assert compiled.call_count == 2


@pytest.mark.parametrize("used", [(0, 1), (1, 0)])
def test_a_weight_that_is_not_used_is_not_taken_for_another(used):
    """Without it both would be one text with different arguments."""

    class Uses(keras.Model):
        def __init__(self, index):
            super().__init__()
            self.index = index
            self.both = [self.add_weight(shape=(3,), initializer="normal") for _ in range(2)]

        def call(self, x):
            return x * self.both[self.index]

    programs, x = SharedPrograms(), np.ones((2, 3), "float32")
    for index in used:
        model = Uses(index)
        wanted = x * np.asarray(model.both[index])
        assert np.array_equal(predict(model, x, programs), wanted)
