"""Tokens that count from the end of a prompt, as a rewrite's own setting: as a call sets them."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import make_gpt2, relative

DIRECTION = np.linspace(-2, 2, 32)
SETTINGS = {
    "steer": (lambda **t: bs.Steer("edit", {0: DIRECTION, 1: DIRECTION}, **t), "tokens", "last"),
    "project": (lambda **t: bs.ProjectOut("edit", DIRECTION, **t), "tokens", (-3, None)),
    "knockout": (lambda **t: bs.Knockout("edit", keys=(0, 2), **t), "queries", (-2, None)),
    "keys": (lambda **t: bs.Knockout("edit", **t), "keys", (-4, -1)),
}
IDS = np.array([[0, 0, 3, 14, 15, 9, 2], [5, 4, 3, 2, 1, 7, 8], [0, 0, 0, 0, 6, 6, 1]])
MASK = np.arange(7) >= np.array([2, 0, 4])[:, None]
PROMPTS = [list(row[mask]) for row, mask in zip(IDS, MASK, strict=True)]
OPTIONS = {"max_new_tokens": 6, "stop_token_ids": None, "return_captures": True}


def prompts():
    return {"token_ids": IDS, "padding_mask": MASK}


def of_call(part, tokens):
    return bs.Control(tokens=tokens) if part == "tokens" else {"heads": 1, part: tokens}


def make(rewrites, backbone=None):
    edited = bs.operate(backbone or make_gpt2(), [*rewrites, bs.Capture("blocks.1")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    return lm


@pytest.fixture(params=SETTINGS)
def setting(request):
    return SETTINGS[request.param]


@pytest.mark.slow
def test_own_tokens_are_those_of_a_call(setting, tmp_path):
    """In generation, in scores, in an engine, and in a recipe that was loaded."""
    build, part, tokens = setting
    own, plain = make([build(**{part: tokens})]), make([build()])
    texts, captures = own.generate(prompts(), **OPTIONS)
    control = {"edit": of_call(part, tokens)}
    wanted, others = plain.generate(prompts(), controls=control, **OPTIONS)
    assert np.array_equal(texts["token_ids"], wanted["token_ids"])
    assert np.array_equal(captures["blocks.1"], others["blocks.1"])
    unedited = plain.generate(prompts(), controls={"edit": 0}, **OPTIONS)[1]
    assert relative(captures["blocks.1"], unedited["blocks.1"]) > 0.01
    everywhere = plain.generate(prompts(), **OPTIONS)[1]
    assert relative(captures["blocks.1"], everywhere["blocks.1"]) > 0.01
    ids = IDS[1:2]
    assert np.array_equal(
        own.score(ids, prompt_lengths=5), plain.score(ids, prompt_lengths=5, controls=control)
    )
    assert np.array_equal(own.score(ids), plain.score(ids, controls=control))
    bs.check(own.opened)
    bs.save_recipe(own, tmp_path / "edit.recipe")
    again = bs.CachedCausalLM(bs.load_recipe(tmp_path / "edit.recipe", make_gpt2()))
    again.compile(sampler="greedy")
    assert np.array_equal(again.generate(prompts(), **OPTIONS)[1]["blocks.1"], captures["blocks.1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "mixtral"])
def test_a_range_of_each_prompt_in_one_batch(name, setting):
    build, part, tokens = setting
    lm = make([build(**{part: tokens})], ROWS[name].make())
    texts = lm.generate(prompts(), **OPTIONS)[0]
    rows = [ids[mask] for ids, mask in zip(*map(np.asarray, texts.values()), strict=True)]
    with bs.Engine(lm, rows=2) as engine:
        for row, prompt in zip(rows, PROMPTS, strict=True):
            one = {"token_ids": [prompt], "padding_mask": np.ones((1, len(prompt)))}
            alone = lm.generate(one, **OPTIONS)[0]["token_ids"]
            assert list(np.asarray(alone)[0]) == list(row)
            request = engine.submit(one, max_new_tokens=6, stop_token_ids=None)
            assert list(request.result()) == list(row)


@pytest.mark.slow
def test_a_condition_that_watches_the_end_of_the_prompt():
    backbone = make_gpt2()
    watched = bs.operate(backbone, [bs.Capture("blocks.0")])
    states = np.asarray(watched(prompts())["captures"]["blocks.0"])
    vector = states[0, -1]  # the last token of the first prompt
    edits = [
        bs.Condition("seen", vector, 0.999, at="blocks.0", tokens="last"),
        bs.Steer("edit", {1: DIRECTION}, when="seen"),
    ]
    lm = make(edits, backbone)
    got = lm.generate(prompts(), **OPTIONS)[1]["blocks.1"]
    off = lm.generate(prompts(), controls={"edit": 0}, **OPTIONS)[1]["blocks.1"]
    changed = [not np.array_equal(a, b) for a, b in zip(got, off, strict=True)]
    assert changed == [True, False, False]


@pytest.mark.slow
def test_a_call_that_does_not_know_the_end_is_refused():
    edited = bs.operate(make_gpt2(), [bs.Steer("edit", {1: DIRECTION}, tokens="last")])
    words = "at input 'edit_tokens': expected a value, since it counts tokens from the end"
    with pytest.raises(bs.SurgeryError, match=words):
        edited(prompts())
    tokens = np.array([[4, 5, 5], [6, 7, 7], [2, 3, 3]], "int32")
    given = np.asarray(edited({**prompts(), "edit_tokens": tokens}))
    plain = np.asarray(bs.open_backbone(make_gpt2())(prompts()))
    differs = np.abs(given - plain).max(axis=-1) > 1e-4
    assert np.array_equal(differs & MASK, np.arange(7)[None].repeat(3, 0) == 6)


def test_what_learns_is_refused():
    with pytest.raises(bs.SurgeryError, match=r"tokens that `fit` knows. Received \(-2, None\)"):
        bs.Reft("edit", rank=1, at="blocks.1", tokens=(-2, None))
    with pytest.raises(bs.SurgeryError, match=r"tokens that `fit` knows. Received 'last'"):
        bs.Steer("edit", {1: DIRECTION}, tokens="last", trainable=True)
    edits = [bs.Steer("edit", {1: DIRECTION}, tokens="last"), bs.LowRank("blocks.0.query", rank=1)]
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), edits))
    lm.compile(optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(bs.SurgeryError, match="counts tokens from the end of a prompt"):
        lm.fit(prompts(), np.roll(IDS, -1, 1), shuffle=False, verbose=0)
