"""Generation equals KerasHub's own, row by row, and compiles only what it must."""

import threading

import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation import samplers as strategies
from tests.helpers import FAMILIES, TASKS, VOCABULARY, make_gpt2, ragged


def make_sampler(name):
    """A new sampler each time: KerasHub's advance their seed as they are used."""
    return {
        "random": lambda: keras_hub.samplers.RandomSampler(seed=5, temperature=0.7),
        "top_k": lambda: keras_hub.samplers.TopKSampler(k=4, seed=5),
        "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.6, seed=5, temperature=1.3),
        "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=3),
    }[name]()


class Pair:
    """A model of ours and KerasHub's own task over the same backbone."""

    def __init__(self, family):
        self.backbone = FAMILIES[family]()
        self.upstream = TASKS[family](backbone=self.backbone, preprocessor=None)
        self.lm = bs.CachedCausalLM(self.backbone)
        self.compile("greedy")

    def compile(self, sampler):
        self.upstream.compile(sampler=sampler)
        self.lm.compile(sampler=sampler)

    def wanted(self, inputs, **kwargs):
        copies = {k: v.copy() for k, v in inputs.items()}
        return {k: np.asarray(v) for k, v in self.upstream.generate(copies, **kwargs).items()}


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def pair(request):
    return Pair(request.param)


@pytest.fixture(scope="module")
def gpt2():
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    return lm


def assert_same(got, wanted):
    mask = wanted["padding_mask"].astype(bool)
    assert np.array_equal(got["padding_mask"], mask)
    assert np.array_equal(got["token_ids"][mask], wanted["token_ids"][mask])


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "lengths",
    [(3, 9, 5), pytest.param((1, 1, 20), marks=pytest.mark.slow), (24, 2, 7)],
    ids=str,
)
def test_greedy_equals_kerashub(pair, rng, lengths):
    pair.compile("greedy")
    inputs = ragged(rng, lengths, 24)
    free = pair.lm.generate(inputs, stop_token_ids=None)
    assert_same(free, pair.wanted(inputs, stop_token_ids=None))
    assert free["padding_mask"].all()
    stops = tuple(int(i) for i in free["token_ids"][:, -3:].ravel())
    stopped = pair.lm.generate(inputs, stop_token_ids=stops)
    assert_same(stopped, pair.wanted(inputs, stop_token_ids=stops))
    assert not stopped["padding_mask"].all() or max(lengths) == 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_takes_the_first_of_the_likeliest(rng, dtype):
    logits = jnp.asarray(rng.integers(-3, 4, (16, 50)), dtype)  # nearly every row has ties
    logits = logits.at[1, :49].set(-jnp.inf)
    done = jnp.arange(16) == 5
    tokens, parents, _ = strategies.Greedy().choose(logits, done, {}, {})
    wanted = np.where(np.asarray(done), 0, np.argmax(np.asarray(logits, "float32"), axis=-1))
    assert tokens.dtype == "int32"
    assert parents is None
    np.testing.assert_array_equal(tokens, wanted)


@pytest.mark.slow
def test_greedy_equals_kerashub_for_gemma_1(rng):
    pair = Pair("gemma")
    inputs = ragged(rng, (3, 9), 20)
    wanted = pair.wanted(inputs, stop_token_ids=None)
    assert_same(pair.lm.generate(inputs, stop_token_ids=None), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "top_k", "top_p", "beam"])
def test_one_row_draws_what_kerashub_draws(pair, rng, sampler):
    pair.compile(make_sampler(sampler))
    inputs = ragged(rng, (4,), 20)
    wanted = pair.wanted(inputs, stop_token_ids=None)
    assert_same(pair.lm.generate(inputs, stop_token_ids=None, seed=5), wanted)


def test_a_row_does_not_depend_on_the_batch_the_padding_or_the_cache(pair, rng):
    pair.compile("greedy")
    inputs = ragged(rng, (5, 16, 1, 9, 3), 16)
    together = pair.lm.generate(inputs, max_new_tokens=12, stop_token_ids=None)["token_ids"]
    left = {k: np.zeros_like(v) for k, v in inputs.items()}
    for i, length in enumerate((5, 16, 1, 9, 3)):
        for name, value in inputs.items():
            left[name][i, 16 - length :] = value[i, :length]
    shifted = pair.lm.generate(left, max_new_tokens=12, stop_token_ids=None)["token_ids"]
    assert np.array_equal(together, shifted)
    longer = pair.lm.generate(inputs, max_new_tokens=40, stop_token_ids=None)["token_ids"]
    for i, length in enumerate((5, 16, 1, 9, 3)):
        alone = {k: v[i : i + 1] for k, v in inputs.items()}
        single = pair.lm.generate(alone, max_new_tokens=12, stop_token_ids=None)["token_ids"]
        assert np.array_equal(single[0], together[i, : length + 12])
        assert np.array_equal(longer[i, : length + 12], together[i, : length + 12])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "top_k", "top_p", "beam"])
def test_a_row_depends_on_its_own_seed_alone(gpt2, rng, sampler):
    gpt2.compile(sampler=make_sampler(sampler))
    inputs = ragged(rng, (4, 9, 6), 9)
    inputs["token_ids"][2] = inputs["token_ids"][1]
    inputs["padding_mask"][2] = inputs["padding_mask"][1]
    options = {"max_new_tokens": 16, "stop_token_ids": None}
    batch = gpt2.generate(inputs, seed=[1, 2, 3], **options)["token_ids"]
    assert np.array_equal(gpt2.generate(inputs, seed=[1, 2, 3], **options)["token_ids"], batch)
    for i, (seed, length) in enumerate(((1, 4), (2, 9), (3, 9))):
        alone = {k: v[i : i + 1] for k, v in inputs.items()}
        single = gpt2.generate(alone, seed=seed, **options)["token_ids"]
        assert np.array_equal(single[0], batch[i, : length + 16])
    assert np.array_equal(batch[1], batch[2]) == (sampler == "beam")
    same = gpt2.generate(inputs, seed=2, **options)["token_ids"]
    assert np.array_equal(same[1], batch[1])
    assert np.array_equal(same[2], batch[1])


@pytest.mark.slow
def test_without_a_seed_every_call_and_row_draws_differently(gpt2, rng):
    gpt2.compile(sampler=keras_hub.samplers.RandomSampler(seed=11))
    inputs = ragged(rng, (4, 4), 4)
    inputs["token_ids"][1] = inputs["token_ids"][0]
    options = {"max_new_tokens": 16, "stop_token_ids": None}
    first, second = (gpt2.generate(inputs, **options)["token_ids"] for _ in range(2))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    gpt2.compile(sampler=keras_hub.samplers.RandomSampler(seed=11))
    assert np.array_equal(gpt2.generate(inputs, **options)["token_ids"], first)


@pytest.mark.slow
def test_custom_sampler_runs(gpt2, rng):
    from keras import ops

    class SecondBest(keras_hub.samplers.Sampler):
        def get_next_token(self, probabilities):
            return ops.top_k(probabilities, k=2)[1][:, 1]

    inputs = ragged(rng, (4,), 10)
    upstream = keras_hub.models.GPT2CausalLM(backbone=gpt2.backbone, preprocessor=None)
    upstream.compile(sampler=SecondBest())
    gpt2.compile(sampler=SecondBest())
    wanted = upstream.generate({k: v.copy() for k, v in inputs.items()}, stop_token_ids=None)
    got = gpt2.generate(inputs, stop_token_ids=None)
    assert np.array_equal(got["token_ids"], wanted["token_ids"])


def test_compilations(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler=keras_hub.samplers.TopPSampler(p=0.9, temperature=0.5))
    options = {"max_new_tokens": 8, "stop_token_ids": None}
    lm.generate(ragged(rng, (3, 9), 9), seed=1, **options)
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    lm.generate(ragged(rng, (16, 2), 16), seed=2, **options)
    lm.generate(ragged(rng, (5, 6), 6), **{**options, "stop_token_ids": (3, 4)})
    lm.sampler.temperature = 0.9
    lm.generate(ragged(rng, (5, 6), 6), **options)
    lm.compile(sampler=keras_hub.samplers.TopPSampler(p=0.3, temperature=2))
    lm.generate(ragged(rng, (5, 6), 6), **options)
    list(_chunks(lm, ragged(rng, (5, 6), 6), 3, **options))
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    lm.generate(ragged(rng, (20, 6), 20), **options)
    assert lm.programs.compilations["prefill"] == 2


@pytest.mark.by_default(1)
@pytest.mark.parametrize("sampler", ["greedy", "beam", "top_p"])
def test_one_new_token_needs_the_prompts_alone(rng, sampler):
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Capture("blocks.1")]))
    lm.compile(sampler=sampler if sampler == "greedy" else make_sampler(sampler))
    inputs, lengths = ragged(rng, (3, 9, 5), 9), [3, 9, 5]
    options = {"seed": [4, 5, 6], "stop_token_ids": None, "strip_prompt": True}
    got = lm.generate(inputs, max_new_tokens=1, **options)
    assert got["padding_mask"].sum(axis=1).tolist() == [1, 1, 1]
    assert lm.programs.compilations == {"prefill": 1, "decode": 0}
    same, captures = lm.generate(inputs, max_new_tokens=1, return_captures=True, **options)
    assert np.array_equal(same["token_ids"], got["token_ids"])
    assert captures.lengths.tolist() == lengths
    assert lm.programs.compilations["decode"] == 0
    several, more = lm.generate(inputs, max_new_tokens=3, return_captures=True, **options)
    if sampler == "top_p":
        wanted = several["token_ids"][:, 0]
    else:
        logits = np.asarray(lm.score(inputs["token_ids"], inputs["padding_mask"]))
        wanted = logits[range(3), np.array(lengths) - 1].argmax(-1)
    assert got["token_ids"][:, 0].tolist() == wanted.tolist()
    for i, length in enumerate(lengths):
        expected = more.row(i)["blocks.1"][:length]
        np.testing.assert_allclose(captures.row(i)["blocks.1"], expected, atol=1e-5)


def _chunks(lm, inputs, chunk, **options):
    from backbone_surgery.generation.request import read_request
    from backbone_surgery.generation.run_batch import run_batch
    from backbone_surgery.generation.samplers import make_strategy

    batch = read_request(lm, inputs, **{"seed": 1, **options}).batch
    return run_batch(lm.programs, make_strategy(lm.sampler), batch, chunk)


@pytest.mark.parametrize("stop", [None, "end", [[1, 2, 3]]], ids=["budget", "token", "sequence"])
def test_a_chunk_is_begun_before_the_last_one_is_looked_at(gpt2, rng, monkeypatch, stop):
    """Unless it may not be wanted: where only the host can tell that a row has ended."""
    gpt2.compile(sampler="greedy")
    inputs = ragged(rng, (5, 6), 6)
    options = {"max_new_tokens": 12, "stop_token_ids": None}
    free = gpt2.generate(inputs, **options)["token_ids"]
    if stop == "end":
        options["stop_token_ids"] = sorted({int(free[0, 5 + 3]), int(free[1, 6 + 4])})
    elif stop:
        options["stop_sequences"] = stop
    wanted = gpt2.generate(inputs, strip_prompt=True, **options)
    begun, decode = [], gpt2.programs.decode
    monkeypatch.setattr(
        gpt2.programs, "decode", lambda *args: begun.append(args[-1]) or decode(*args)
    )
    counts, yielded = [], []
    for rows in _chunks(gpt2, inputs, 4, **options):
        counts.append(len(begun))
        yielded.append(rows)
    for i, row in enumerate(yielded[-1]):
        assert (
            row.new.tolist() == wanted["token_ids"][i, : wanted["padding_mask"][i].sum()].tolist()
        )
    by_sequence = isinstance(stop, list)
    assert counts[0] == (1 if by_sequence else 2)
    assert counts[-1] <= len(counts) + (0 if by_sequence else 1)


def test_a_stream_that_is_left_leaves_nothing_behind(gpt2, rng):
    gpt2.compile(sampler="greedy")
    options = {"max_new_tokens": 12, "stop_token_ids": None}
    inputs = ragged(rng, (5, 6), 6)
    before = gpt2.generate(inputs, **options)["token_ids"]
    left = _chunks(gpt2, inputs, 4, **options)
    next(left)
    left.close()
    assert np.array_equal(gpt2.generate(inputs, **options)["token_ids"], before)


@pytest.mark.slow
def test_four_threads_give_what_one_gives(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler=make_sampler("top_p"))
    prompts = [ragged(rng, (n, 3), 8) for n in (2, 4, 6, 8)]
    options = {"max_new_tokens": 24, "stop_token_ids": None, "seed": 3}
    results = [None] * 4

    def work(i):
        for _ in range(3):
            results[i] = lm.generate(prompts[i], **options)["token_ids"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    for prompt, result in zip(prompts, results, strict=True):
        assert np.array_equal(lm.generate(prompt, **options)["token_ids"], result)


@pytest.mark.slow
def test_batch_size_splits_and_changes_nothing(gpt2, rng, capsys):
    gpt2.compile(sampler=make_sampler("random"))
    inputs = ragged(rng, (5, 2, 7, 3, 4), 7)
    options = {"max_new_tokens": 6, "stop_token_ids": None, "seed": [9, 8, 7, 6, 5]}
    whole = gpt2.generate(inputs, **options)["token_ids"]
    parts = gpt2.generate(inputs, batch_size=2, verbose=1, **options)["token_ids"]
    assert np.array_equal(whole, parts)
    assert "generating" in capsys.readouterr().out


def test_stop_sequences_of_ids(gpt2, rng):
    gpt2.compile(sampler="greedy")
    inputs = ragged(rng, (4, 6), 6)
    options = {"max_new_tokens": 30, "stop_token_ids": None}
    free = gpt2.generate(inputs, **options)["token_ids"]
    stop = free[0, 4 + 7 : 4 + 9]
    got = gpt2.generate(inputs, stop_sequences=[stop.tolist()], **options)
    for i, length in enumerate((4, 6)):
        new = free[i, length : length + 30].tolist()
        ends = [k + 2 for k in range(29) if new[k : k + 2] == stop.tolist()]
        wanted = length + min(ends, default=30)
        assert got["padding_mask"][i].sum() == wanted
        assert np.array_equal(got["token_ids"][i, :wanted], free[i, :wanted])


def test_strip_prompt_returns_the_new_part(gpt2, rng):
    gpt2.compile(sampler="greedy")
    inputs = ragged(rng, (4, 6), 6)
    options = {"max_new_tokens": 5, "stop_token_ids": None}
    whole = gpt2.generate(inputs, **options)["token_ids"]
    new = gpt2.generate(inputs, strip_prompt=True, **options)
    assert new["padding_mask"].sum(axis=1).tolist() == [5, 5]
    assert np.array_equal(new["token_ids"][0, :5], whole[0, 4:9])
    assert np.array_equal(new["token_ids"][1, :5], whole[1, 6:11])


def test_no_new_tokens_returns_the_prompt(gpt2, rng):
    inputs = ragged(rng, (4, 6), 6)
    got = gpt2.generate(inputs, max_new_tokens=0, stop_token_ids=None)
    assert np.array_equal(got["token_ids"], inputs["token_ids"])
    assert np.array_equal(got["padding_mask"], inputs["padding_mask"])


def test_nothing_a_caller_passes_is_changed(gpt2, rng):
    inputs = ragged(rng, (4, 6), 12)
    copies = {k: v.copy() for k, v in inputs.items()}
    gpt2.generate(inputs, stop_token_ids=None)
    assert all(np.array_equal(inputs[k], copies[k]) for k in inputs)


@pytest.mark.slow
def test_call_with_cache(pair, rng):
    ids = rng.integers(1, VOCABULARY, (2, 10)).astype("int32")
    wanted = np.asarray(pair.upstream({"token_ids": ids, "padding_mask": np.ones_like(ids)}))
    cache = bs.new_cache(pair.lm.backbone_with_cache, 2, 12)
    first, hidden, cache = pair.lm.call_with_cache(ids[:, :6], cache, 0)
    second, _, cache = pair.lm.call_with_cache(ids[:, 6:], cache, 6)
    got = np.concatenate([first, second], axis=1)
    assert hidden.shape == (2, 6, 32)
    assert np.abs(got - wanted).max() <= 5e-6 * np.abs(wanted).max()
    with pytest.raises(bs.SurgeryError, match="expected room for 4 tokens"):
        pair.lm.call_with_cache(ids[:, 6:], cache, 9)


def test_prefill_and_decode_donate_the_cache(gpt2, rng):
    gpt2.compile(sampler="greedy")
    gpt2.generate(ragged(rng, (4, 6), 6), max_new_tokens=5, stop_token_ids=None)
    leaves = 2 * len(gpt2.backbone_with_cache.output["cache"])
    for kind in ("prefill", "decode"):
        header = gpt2.programs.compiled(kind)[-1].as_text().split("\n", 1)[0]
        assert header.count("may-alias") + header.count("must-alias") >= leaves
