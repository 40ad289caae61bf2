"""`check` takes controls as they are called, and tells of those that are none."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2

DIRECTION = np.linspace(-1, 1, 32, dtype="float32")


def test_controls_are_those_of_one_row():
    edited = bs.operate(make_gpt2(), [bs.Steer("mood", {1: DIRECTION}, strength=0.0)])
    plain, steered = (
        bs.check(edited, controls={"mood_strength": np.float32([x])}) for x in (0.0, 4.0)
    )
    assert max(steered.errors.values()) <= 1e-5
    assert steered.errors != plain.errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"controls": [1.0]}, r"check at 'controls': expected \{input name.*Received \[1\.0\]"),
        ({"controls": {"mod_strength": 1.0}}, "check at control 'mod_strength'.*'mood_strength'"),
        ({"controls": {"mood_strength": "much"}}, r"expected float32\[1\], one row\. Received"),
        ({"controls": {"mood_strength": np.ones((2, 1))}}, r"float32\[1\], one row\. Received"),
        ({"seed": -1}, "check at 'seed': expected an int from 0. Received -1"),
        ({"seed": 1.5}, "check at 'seed': expected an int from 0. Received 1.5"),
    ],
)
def test_what_is_none_is_refused(options, words):
    edited = bs.operate(make_gpt2(), [bs.Steer("mood", {1: DIRECTION}, strength=0.0)])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.check(edited, **options)
