"""Whatever is passed to control vectors is used or refused in words, and what is saved is read."""

import keras_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import backbone_surgery as bs
from backbone_surgery.vectors.directions import find_direction
from tests.rubbish import complaints, with_rubbish

PAIRS = [([1, 2, 3], [4, 5]), ([6, 7], [8, 9]), ([3], [5])]


@pytest.fixture(scope="module")
def lm():
    backbone = keras_hub.models.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=16)
    return bs.CachedCausalLM(backbone)


def test_vectors_and_pairs(tmp_path):
    made = {"directions": lambda: {1: np.ones(8)}, "info": lambda: {"method": "mine"}}
    template = "I am {persona}. {suffix}"
    texts = {
        "template": lambda: template,
        "positives": lambda: ["a"],
        "negatives": lambda: ["b"],
        "suffixes": lambda: ["c"],
    }

    def save_and_load(**kwargs):
        vector = bs.ControlVector(**kwargs)
        for suffix in ("gguf", "safetensors"):
            path = tmp_path / f"v.{suffix}"
            vector.save(path)
            assert bs.ControlVector.load(path) == vector

    save_and_load(**{k: v() for k, v in made.items()})
    vector = bs.ControlVector({1: np.ones(8)})
    vector.save(tmp_path / "good.gguf")
    load = {"path": lambda: tmp_path / "good.gguf", "shift": lambda: 0, "lm": lambda: None}
    calls = {
        **with_rubbish(save_and_load, made),
        **with_rubbish(bs.contrast_pairs, texts),
        **with_rubbish(bs.ControlVector.load, load),
        **with_rubbish(vector.save, {"path": lambda: tmp_path / "w.gguf"}),
    }
    assert not complaints(calls)


@pytest.mark.slow
def test_training(lm):
    train = {
        "pairs": lambda: PAIRS,
        "method": lambda: "mean_diff",
        "batch_size": lambda: 2,
        "token": lambda: -1,
        "verbose": lambda: 0,
        "at": lambda: "blocks.*",
    }
    calls = {
        **with_rubbish(lambda **kwargs: bs.ControlVector.train(lm, **kwargs), train),
        **with_rubbish(lambda lm: bs.ControlVector.train(lm, PAIRS), {"lm": lambda: lm}),
        **with_rubbish(
            lambda text: bs.ControlVector.train(lm, [(text, [1, 2])], "mean_diff", verbose=0),
            {"text": lambda: [3, 4]},
        ),
    }
    # What has no end cannot be refused; what is used runs the model, and once is enough.
    used = (
        "pairs=endless",
        "verbose=True",
        "verbose=False",
        "verbose=0",
        "verbose=-1",
        "verbose=2",
    )
    assert not complaints({name: f for name, f in calls.items() if not name.startswith(used)})


def test_arithmetic_and_norms(lm):
    vector = bs.ControlVector({1: np.ones(8)})
    assert np.float32(2) * vector == vector * np.int64(2) == vector / 0.5
    for factor in (np.nan, np.inf, 1e300, 10**5000):
        with pytest.raises(bs.SurgeryError, match="expected a finite factor"):
            vector * factor
    for divisor in (0, 0.0, np.nan, np.int64(0)):
        with pytest.raises(bs.SurgeryError, match="a finite divisor other than 0"):
            vector / divisor
    for other in (True, "2", None, [1]):
        with pytest.raises(TypeError):
            vector * other
        with pytest.raises(TypeError):
            vector / other
    relative = {"lm": lambda: lm, "texts": lambda: [[1, 2]], "batch_size": lambda: 2}
    calls = with_rubbish(vector.relative_to, relative)
    del calls["texts=endless generator"], calls["texts=None"]
    assert not complaints(calls)


VECTOR = bs.ControlVector({1: np.ones(8)})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: bs.ControlVector.train(lm, PAIRS, token=1.5), "'token': expected an integer"),
        (lambda lm: bs.ControlVector.train(lm, PAIRS, verbose="no"), "'verbose': expected 0 or 1"),
        (lambda lm: bs.ControlVector.train(None, PAIRS), "train: expected a `CachedCausalLM`"),
        (lambda lm: VECTOR.relative_to(lm, []), "relative_to: expected a list of texts"),
        (
            lambda lm: bs.ControlVector({5: np.ones(8)}).relative_to(lm, [[1, 2]]),
            r"relative_to: expected a vector of size 8 for blocks 0 to 1. Received .*5",
        ),
        (lambda lm: bs.ControlVector.load("v.gguf", 0.5), "expected `shift` to be an integer"),
        (lambda lm: VECTOR.save("missing/v.gguf"), "expected a file in a folder that exists"),
        (
            lambda lm: find_direction("logistic", np.ones((2, 8)), np.ones((2, 8))),
            "train: expected activations that differ between the sides",
        ),
    ],
)
def test_refusals_say_what_is_expected(lm, call, words):
    with pytest.raises(bs.SurgeryError, match=words):
        call(lm)


NAMES = st.text(max_size=12)
VALUES = st.one_of(st.text(max_size=20), st.integers(-9, 9), st.sampled_from(["unknown", "F32"]))
KEYS = st.one_of(NAMES, st.sampled_from(["model_hint", "sha256", "format", "layer_count", "a.b"]))


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(info=st.dictionaries(KEYS, VALUES, max_size=4), block=st.integers(1, 999_999))
def test_what_is_accepted_comes_back_from_a_file(tmp_path, info, block):
    try:
        vector = bs.ControlVector({block: np.arange(3)}, info)
    except bs.SurgeryError:
        return
    for suffix in ("gguf", "safetensors"):
        vector.save(tmp_path / f"v.{suffix}")
        loaded = bs.ControlVector.load(tmp_path / f"v.{suffix}")
        assert loaded == vector
        assert {**vector.info, "hidden_dim": "3"} == dict(loaded.info)


def test_info_that_says_nothing_is_left_out():
    """A GGUF file would not keep it, and could not be loaded again."""
    info = {"origin": "", "model_hint": "unknown", "num_blocks": np.int64(4)}
    assert dict(bs.ControlVector({1: np.ones(3)}, info).info) == {"num_blocks": "4"}
    for bad in ({"sha256": "0"}, {"format": "x"}, {"a\0": "x"}, {"a": "\ud800"}, {"a": True}):
        with pytest.raises(bs.SurgeryError, match=r"expected `info` to be {name: text}"):
            bs.ControlVector({1: np.ones(3)}, bad)
