"""Prompt lookup gives the text of one token at a time, wherever a guess breaks."""

import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backbone_surgery as bs
from backbone_surgery.generation import run_batch
from backbone_surgery.generation.lookup import LookUp
from backbone_surgery.generation.samplers import NO_TOKEN, Greedy
from backbone_surgery.kernels import calls
from tests.helpers import FAMILIES, make_gpt2, ragged
from tests.recurrent import RECURRENT

SAMPLERS = {
    "greedy": lambda: "greedy",
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.8, temperature=0.1),
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=5, temperature=0.2),
}
STORY = "Once upon a time there was a red ball. It was a big red ball. Tom had a big red"


def rows_of_one(lm, inputs, lookup, **options):
    """Return the tokens of each row, run alone."""
    return lm.generate(inputs, batch_size=1, lookup=lookup, **options)["token_ids"]


def python_guess(tokens, first, last, count, price):
    """Guess in plain Python: the eight places that are most alike, then latest, have a vote."""
    text, places = list(tokens[: last + 1]), []
    for end in range(first, last):
        equal = 0
        while equal < 8 and end - equal >= first and text[end - equal] == text[-1 - equal]:
            equal += 1
        places.append((equal, end))
    votes = {end: 2**equal for equal, end in sorted(places, reverse=True)[:8] if equal}
    right, expected = 1.0, 0.0
    for ahead in range(1, count + 1):
        sums = {}
        for end, vote in votes.items():
            sums[text[end + ahead]] = sums.get(text[end + ahead], 0) + vote
        if not sums:
            break
        guess = max(sums, key=sums.get)  # the first of several
        right *= sums[guess] / (sum(votes.values()) + 4)
        expected += right
        text.append(guess)
        votes = {end: 2 * vote for end, vote in votes.items() if text[end + ahead] == guess}
    return text[last + 1 :], expected > price + count / 16


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
TWICE = st.lists(st.integers(0, 3), min_size=1, max_size=11).map(lambda text: 2 * text)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TEXTS | TWICE, st.integers(0, 3), st.integers(1, 6))
def test_guesses_are_those_of_plain_python(text, padding, count):
    length = 32
    tokens = np.zeros((1, length), np.int32)
    tokens[0, padding : padding + len(text)] = text
    known = np.ones((1, length), bool)
    known[0, :padding] = False
    state = {
        "tokens": jnp.asarray(tokens),
        "cache_mask": jnp.asarray(known),
        "slot": jnp.int32(padding + len(text)),
        "draws": {"trust": jnp.float32(1)},
    }
    look_up = LookUp(Greedy(), count)
    guesses, worth = look_up.guess(state)
    last = padding + len(text) - 1
    wanted, likely = python_guess(tokens[0], padding, last, count, look_up._price)
    assert bool(worth) == likely
    assert guesses.tolist()[: len(wanted)] == wanted


def kept(chosen, guesses, stop_ids=(NO_TOKEN,), left=9):
    """Choose these tokens after the last one and each guess; return the state after."""
    logits = np.zeros((1, len(chosen), 10), np.float32)
    for i, token in enumerate(chosen):
        logits[0, i] = np.nan if token == NO_TOKEN else np.arange(10) == token
    strategy = LookUp(Greedy(), len(guesses))
    state = {
        "tokens": jnp.full((1, 16), 7, jnp.int32),
        "done": jnp.zeros(1, bool),
        "slot": jnp.int32(5),
        "start": jnp.int32(4),
        "draws": strategy.start(np.zeros((1, 2), np.uint32)),
    }
    arguments = {
        "stop_ids": jnp.asarray(stop_ids, jnp.int32),
        "budget": jnp.asarray([left + 1]),
        "settings": {},
    }
    after = strategy.choose_all(jnp.asarray(logits), jnp.asarray(guesses), state, arguments)
    slot = int(after["slot"])
    return list(map(int, after["tokens"][0, 5:slot])), bool(after["done"][0])


@pytest.mark.slow
def test_wrong_guesses_use_up_trust_and_time_gives_it_back():
    strategy = LookUp(Greedy(), 4)
    state = {
        "tokens": jnp.asarray([[1, 2, 3, 4, 5, 1, 2, 0, 0, 0, 0, 0]], jnp.int32),
        "cache_mask": jnp.ones((1, 12), bool),
        "done": jnp.zeros(1, bool),
        "slot": jnp.int32(7),
        "start": jnp.int32(7),
        "draws": strategy.start(np.zeros((1, 2), np.uint32)),
    }
    arguments = {"stop_ids": jnp.asarray([NO_TOKEN]), "budget": jnp.asarray([9]), "settings": {}}
    logits, wrong = jnp.eye(10)[None, [9] * 5], 0
    while strategy.guess(state)[1]:
        draws = strategy.choose_all(logits, strategy.guess(state)[0], state, arguments)["draws"]
        state, wrong = {**state, "draws": draws}, wrong + 1
    waited = 0
    while not strategy.guess(state)[1]:
        _, _, draws = strategy.choose(logits[:, 0], state["done"], state["draws"], {})
        state, waited = {**state, "draws": draws}, waited + 1
    # Passes of a price each use up what two right guesses are worth, and a step gives back a 64th.
    assert (wrong, waited) == ((16, 1) if calls.available() else (3, 17))


@pytest.mark.slow
@pytest.mark.parametrize("right", range(5))
def test_a_guess_may_break_at_each_place(right):
    chosen = [1, 2, 3, 4, 5]
    guesses = [token if i < right else 9 for i, token in enumerate(chosen[:-1])]
    assert kept(chosen, guesses) == (chosen[: right + 1], False)


@pytest.mark.parametrize("at", range(5))
def test_a_row_ends_within_right_guesses(at):
    chosen = [1, 2, 3, 4, 5]
    for options in ({"stop_ids": [chosen[at]]}, {"left": at + 1}):
        assert kept(chosen, chosen[:-1], **options) == (chosen[: at + 1], True)
    broken = [*chosen[:at], NO_TOKEN, *chosen[at + 1 :]]
    assert kept(broken, chosen[:-1], stop_ids=[NO_TOKEN]) == (broken[: at + 1], True)


def test_a_stop_token_after_the_break_does_not_count():
    assert kept([1, 2, 3, 4, 5], [1, 9, 3, 4], stop_ids=[4]) == ([1, 2], False)
    assert kept([1, 2, 3, 4, 5], [1, 9, 3, 4], stop_ids=[2]) == ([1, 2], True)


@pytest.mark.parametrize("name", [pytest.param("tiny_gpt2", marks=pytest.mark.slow), "tiny_gemma"])
def test_texts_of_a_bundled_model_stay(name):
    lm = bs.CachedCausalLM.from_preset(name)
    lm.compile(sampler="greedy")
    for options in ({"max_new_tokens": 60}, {"max_length": 70, "stop_sequences": [" the"]}):
        wanted = lm.generate(STORY, **options)
        assert [lm.generate(STORY, lookup=k, **options) for k in (1, 4)] == [wanted] * 2
    pieces = list(lm.stream(STORY, max_new_tokens=60, chunk_size=1, lookup=4))
    assert "".join(pieces) == lm.generate(STORY, max_new_tokens=60)
    one_by_one = list(lm.stream(STORY, max_new_tokens=60, chunk_size=1))
    assert len(pieces) < len(one_by_one)  # several tokens came at once


@pytest.mark.slow
def test_a_second_row_that_fills_up_changes_nothing(rng, monkeypatch):
    """As a program for a GPU has it."""
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (5,), 60)
    wanted = lm.generate(inputs, stop_token_ids=None)["token_ids"]
    monkeypatch.setattr(run_batch, "least_rows", lambda platform: 2)
    assert np.array_equal(lm.generate(inputs, stop_token_ids=None, lookup=4)["token_ids"], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lookup", [1, 3, 16])
def test_tokens_stay(family, sampler, lookup, rng, monkeypatch):
    monkeypatch.setattr(run_batch, "_GROWS_FROM", 16)  # guesses meet the end of a cache
    lm = bs.CachedCausalLM(FAMILIES[family]())
    lm.compile(sampler=SAMPLERS[sampler]())
    inputs = ragged(rng, (1, 5, 9), 60)
    wanted = rows_of_one(lm, inputs, None, seed=[1, 2, 3], stop_token_ids=None)
    got = rows_of_one(lm, inputs, lookup, seed=[1, 2, 3], stop_token_ids=None)
    assert np.array_equal(got, wanted)
    stop = tuple(map(int, wanted[:, 30]))
    ends = {"seed": [1, 2, 3], "stop_token_ids": stop}
    assert np.array_equal(
        rows_of_one(lm, inputs, lookup, **ends), rows_of_one(lm, inputs, None, **ends)
    )


@pytest.mark.slow
def test_edits_conditions_and_captures_stay(rng):
    direction = rng.normal(size=32)
    edits = [
        bs.Condition("met", direction, 0.2, at="blocks.0"),
        bs.Steer("mood", {1: direction}, when="met", tokens=(12, 30)),
        bs.Capture("blocks.1"),
        bs.Capture("blocks.0.attention_pattern"),
    ]
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), edits))
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (9,), 9)
    options = {"max_new_tokens": 40, "stop_token_ids": None, "controls": {"mood": 2.0}}
    wanted, saw = lm.generate(inputs, return_captures=True, **options)
    got, seen = lm.generate(inputs, return_captures=True, lookup=5, **options)
    assert np.array_equal(got["token_ids"], wanted["token_ids"])
    assert saw.values.keys() == seen.values.keys()
    for path, value in saw.values.items():
        np.testing.assert_allclose(seen[path], value, atol=1e-5)


@pytest.mark.slow
def test_no_more_positions_than_the_model_learned(rng):
    lm = bs.CachedCausalLM(make_gpt2(max_sequence_length=24))
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4,), 24)
    wanted = lm.generate(inputs, stop_token_ids=None)["token_ids"]
    assert np.array_equal(lm.generate(inputs, stop_token_ids=None, lookup=8)["token_ids"], wanted)


@pytest.mark.slow
def test_what_cannot_be_guessed_is_refused(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    one, two = ragged(rng, (4,), 9), ragged(rng, (4, 5), 9)
    for bad in (0, 17, 2.5, "all", True):
        with pytest.raises(bs.SurgeryError, match="'lookup': expected an int from 1 to 16"):
            lm.generate(one, stop_token_ids=None, lookup=bad)
    with pytest.raises(bs.SurgeryError, match="expected one prompt at a time"):
        lm.generate(two, stop_token_ids=None, lookup=4)
    with pytest.raises(bs.SurgeryError, match="expected one prompt at a time"):
        lm.generate(two, stop_token_ids=None, lookup=4, batch_size=2)
    lm.compile(sampler="beam")
    with pytest.raises(bs.SurgeryError, match="Received beam search"):
        lm.generate(one, stop_token_ids=None, lookup=4)
    recurrent = bs.CachedCausalLM(RECURRENT["qwen3_5"].make())
    recurrent.compile(sampler="greedy")
    with pytest.raises(bs.SurgeryError, match="one array for the whole text"):
        recurrent.generate(one, stop_token_ids=None, lookup=4)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}
