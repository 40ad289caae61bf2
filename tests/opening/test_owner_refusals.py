"""LoRA that an edited model refuses leaves the backbone as it was."""

import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2


def state(backbone):
    return [(v.path, tuple(v.shape), v.trainable) for v in backbone.variables]


@pytest.mark.parametrize(
    ("rank", "names", "words"),
    [
        (0, None, "'rank': expected a positive int. Received 0"),
        (-1, None, "'rank': expected a positive int"),
        ("4", None, "'rank': expected a positive int. Received '4'"),
        (None, None, "'rank': expected a positive int"),
        (2, ["qury"], r"such as .*query.*Received \['qury'\]"),
        (2, "query", "expected a list with names of layers.*Received 'query'"),
        (2, [], r"Received \[\]"),
    ],
)
def test_lora_that_cannot_be(rank, names, words):
    edited = bs.operate(make_gpt2(num_layers=1), [])
    before = state(edited.owner)
    with pytest.raises(bs.SurgeryError, match=f"enable_lora at .*{words}"):
        edited.enable_lora(rank, target_layer_names=names)
    assert state(edited.owner) == before
    edited.enable_lora(np.int64(2))


def test_lora_twice_freezes_nothing():
    edited = bs.operate(make_gpt2(num_layers=2), [])
    edited.enable_lora(2)
    before = state(edited.owner)
    with pytest.raises(bs.SurgeryError, match="expected layers without LoRA"):
        edited.enable_lora(4)
    assert state(edited.owner) == before
    edited.enable_lora(2, target_layer_names=["key"])
