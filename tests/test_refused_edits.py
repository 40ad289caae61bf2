"""Edits that would be silently wrong are refused, in words."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.conftest import make_gpt2


@pytest.fixture(scope="module")
def backbone():
    return make_gpt2()


@pytest.mark.parametrize(
    "later",
    [
        bs.Skip("blocks.1", name="a", amount=0.0),
        bs.Ablate("blocks.1", name="a"),
        bs.Patch("blocks.1", name="a"),
    ],
)
def test_two_rewrites_of_one_control_are_refused(backbone, later):
    steer = bs.Steer("a", {0: np.ones(32)})
    words = f"control 'a': .* {type(later).__name__} and Steer .*Give the rewrite another name"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(backbone, [steer, later])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(bs.operate(backbone, [steer]), [later])
