"""A cache that grows while decoding gives what one of the full length gives."""

import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation import run_batch
from tests.helpers import FAMILIES, TASKS, make_gpt2, ragged

OPTIONS = {"max_new_tokens": 46, "stop_token_ids": None}


@pytest.fixture
def from_16(monkeypatch):
    """Let small caches grow: prompts of up to 16 tokens start in 24 slots, then 48, then 64."""
    monkeypatch.setattr(run_batch, "_GROWS_FROM", 16)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_greedy_equals_kerashub(family, rng, from_16):
    backbone = FAMILIES[family]()
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (3, 9), 60)
    got = lm.generate(inputs, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 1, "decode": 3}
    upstream = TASKS[family](backbone=backbone, preprocessor=None)
    upstream.compile(sampler="greedy")
    wanted = upstream.generate({k: v.copy() for k, v in inputs.items()}, stop_token_ids=None)
    assert np.array_equal(got["token_ids"], wanted["token_ids"])


def make_beams():
    return keras_hub.samplers.BeamSampler(num_beams=3)


def make_random():
    return keras_hub.samplers.RandomSampler(seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_beams, make_random])
def test_samplers_and_conditions_do_not_notice(make, rng, monkeypatch):
    direction = rng.normal(size=32)
    rewrites = [
        bs.Condition("met", direction, 0.3, at="blocks.0"),
        bs.Steer("mood", {1: direction}, when="met"),
    ]
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), rewrites))
    lm.compile(sampler=make())
    inputs = ragged(rng, (4, 9, 2), 9)
    wanted = lm.generate(inputs, seed=[1, 2, 3], **OPTIONS)["token_ids"]
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    monkeypatch.setattr(run_batch, "_GROWS_FROM", 16)
    got = lm.generate(inputs, seed=[1, 2, 3], **OPTIONS)["token_ids"]
    assert lm.programs.compilations == {"prefill": 2, "decode": 3}
    assert np.array_equal(got, wanted)


@pytest.mark.slow
def test_rows_that_end_early_need_no_longer_cache(rng, from_16):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4,), 4)
    free = lm.generate(inputs, **OPTIONS)["token_ids"][0]
    grown = dict(lm.programs.compilations)
    lm = bs.CachedCausalLM(lm.backbone)
    lm.compile(sampler="greedy")
    stop = (int(free[4 + 3]),)
    ended = lm.generate(inputs, **{**OPTIONS, "stop_token_ids": stop})["token_ids"][0]
    end = 4 + int(np.flatnonzero(free[4:] == stop[0])[0]) + 1
    assert np.array_equal(ended[:end], free[:end])
    assert grown["decode"] == 3
    assert lm.programs.compilations["decode"] == 1


@pytest.mark.slow
def test_a_chunk_may_end_anywhere(rng, from_16):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4, 6), 6)
    wanted = lm.generate(inputs, **OPTIONS)
    never = [[0] * 40]  # looked for after every chunk of steps
    got = lm.generate(inputs, stop_sequences=never, **OPTIONS)
    assert np.array_equal(got["token_ids"], wanted["token_ids"])
