"""What measures a model leaves its weights where they are, for other threads to generate with."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import make_gpt2

TEXT, OTHER = [1, 2, 3, 4], [1, 5, 3, 4]
MEASURES = {
    "check": lambda lm: bs.check(lm.opened),
    "logit lens": lambda lm: bs.logit_lens(lm, TEXT),
    "patch grid": lambda lm: bs.patch_grid(lm, TEXT, OTHER, metric=(7, 8), at="blocks.*"),
    "attribution": lambda lm: bs.attribution(lm, TEXT, target=7, at="blocks.*"),
    "training": lambda lm: bs.ControlVector.train(lm, [(TEXT, OTHER), (OTHER, TEXT)]),
}


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
