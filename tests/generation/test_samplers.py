"""A sampler is what it is when `generate` is called; logits that are no numbers are an error."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest
from keras import ops

import backbone_surgery as bs
from backbone_surgery.generation import programs as programs_module
from backbone_surgery.generation.request import resolve_seeds
from backbone_surgery.generation.samplers import NO_TOKEN, make_strategy
from tests.helpers import make_gpt2, ragged

SAMPLERS = {
    "greedy": keras_hub.samplers.GreedySampler,
    "random": lambda: keras_hub.samplers.RandomSampler(seed=5),
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=4, seed=5),
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.9, seed=5),
    "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=3),
}
DRAWING = ["random", "top_k", "top_p"]
OPTIONS = {"max_new_tokens": 6, "stop_token_ids": None, "seed": 3}


class Only(keras_hub.samplers.Sampler):
    """Choose the likeliest of some tokens."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed = allowed

    def get_next_token(self, probabilities):
        allowed = ops.convert_to_tensor(self.allowed)
        return ops.take(allowed, ops.argmax(ops.take(probabilities, allowed, axis=-1), axis=-1))


@pytest.fixture(scope="module")
def lm():
    return bs.CachedCausalLM(make_gpt2(num_layers=1))


@pytest.fixture
def prompt(rng):
    return ragged(rng, (4, 6), 6)


def generate(lm, prompt):
    return lm.generate(prompt, strip_prompt=True, **OPTIONS)["token_ids"][:, :6]


def anew(lm, prompt, sampler):
    """Generate by a sampler that nothing was compiled for."""
    other = bs.CachedCausalLM(lm.backbone)
    other.compile(sampler=sampler)
    return generate(other, prompt)


@pytest.mark.slow
def test_a_users_own_sampler_is_taken_as_it_is_now(lm, prompt):
    sampler = Only([3, 4])
    lm.compile(sampler=sampler)
    assert set(generate(lm, prompt).ravel()) <= {3, 4}
    sampler.allowed.append(5)  # in place
    assert np.array_equal(generate(lm, prompt), anew(lm, prompt, Only([3, 4, 5])))
    sampler.allowed = [7]
    assert set(generate(lm, prompt).ravel()) == {7}
    sampler.get_next_token = lambda probabilities: jnp.full(len(probabilities), 8)
    assert set(generate(lm, prompt).ravel()) == {8}


def test_a_sampler_made_anew_for_each_call_compiles_once(lm, prompt):
    lm.compile(sampler=Only(np.array([3, 4])))
    generate(lm, prompt)
    before = dict(lm.programs.compilations)
    for _ in range(3):
        lm.compile(sampler=Only(np.array([3, 4])))
        generate(lm, prompt)
    assert lm.programs.compilations == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("random", {"temperature": 1e-5}),
        ("top_k", {"k": 1}),
        ("top_p", {"p": 1e-6}),
        ("top_p", {"k": 1}),
        ("beam", {"num_beams": 1}),
        ("beam", {"temperature": 4.0}),
    ],
)
def test_settings_of_kerashubs_samplers_are_taken_as_they_are_now(lm, prompt, name, change):
    sampler = SAMPLERS[name]()
    lm.compile(sampler=sampler)
    before = generate(lm, prompt)
    vars(sampler).update(change)
    as_now = SAMPLERS[name]()
    vars(as_now).update(change)
    got = generate(lm, prompt)
    assert np.array_equal(got, anew(lm, prompt, as_now))
    assert name == "beam" or not np.array_equal(got, before)
    if name != "beam":  # all others are greedy now
        assert np.array_equal(got, anew(lm, prompt, "greedy"))


def test_a_beam_sampler_of_ones_own_scores_as_it_says(lm, prompt):
    class Forbid(keras_hub.samplers.BeamSampler):
        def compute_probabilities(self, logits):
            allowed = np.arange(60) < 10
            return super().compute_probabilities(ops.where(allowed, logits, -np.inf))

    lm.compile(sampler=Forbid(num_beams=2))
    assert generate(lm, prompt).max() < 10

    class Loop(keras_hub.samplers.BeamSampler):
        def __call__(self, *args, **kwargs):
            return args[0]

    with pytest.raises(bs.SurgeryError, match=r"sampler Loop: .*loop of its own"):
        lm.compile(sampler=Loop())


@pytest.mark.slow
def test_programs_of_samplers_that_went_are_let_go(lm, prompt, monkeypatch):
    monkeypatch.setattr(programs_module, "_STRATEGIES", 2)
    lm.compile(sampler=Only([0]))
    generate(lm, prompt)
    oldest = weakref.ref(lm.programs.compiled("decode")[-1])
    for token in (1, 2):
        lm.compile(sampler=Only([token]))
        generate(lm, prompt)
    gc.collect()
    assert len(lm.programs.compiled("prefill")) == 2
    assert oldest() is None
    before = dict(lm.programs.compilations)
    generate(lm, prompt)
    assert lm.programs.compilations == before
    lm.compile(sampler=Only([0]))
    assert set(generate(lm, prompt).ravel()) == {0}


@pytest.mark.slow
def test_a_text_is_made_by_the_sampler_that_it_was_begun_with(rng, monkeypatch):
    from backbone_surgery.generation import run_batch

    monkeypatch.setattr(run_batch, "_GROWS_FROM", 16)  # so that the cache has to grow
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2", load_weights=False)
    banned = lm.preprocessor.tokenizer.token_to_id("a")
    sampler = Only([banned])
    lm.compile(sampler=sampler)
    options = {"max_new_tokens": 60, "stop_token_ids": None}
    wanted = lm.generate("Tom", **options)
    lm = bs.CachedCausalLM(lm.backbone, lm.preprocessor)
    lm.compile(sampler=sampler)
    stream = lm.stream("Tom", chunk_size=2, **options)
    pieces = [next(stream)]
    sampler.allowed = [banned + 1]
    assert "".join([*pieces, *stream]) == wanted
    sampler.allowed = [banned]
    lm = bs.CachedCausalLM(lm.backbone, lm.preprocessor)
    lm.compile(sampler=sampler)
    stream = lm.stream("Tom", chunk_size=2, **options)
    next(stream)
    sampler.allowed[0] = banned + 1
    with pytest.raises(bs.SurgeryError, match="sampler Only: expected lists, arrays and objects"):
        list(stream)


@pytest.mark.parametrize("odd", [{}, {"class_name": "x"}, 3, None, 1.5, ["greedy"], object()])
def test_what_is_no_sampler(lm, odd):
    with pytest.raises(bs.SurgeryError, match="compile with"):
        lm.compile(sampler=odd)


def test_a_sampler_that_was_not_initialised(lm):
    class Bare(keras_hub.samplers.Sampler):
        def __init__(self):
            pass

    with pytest.raises(bs.SurgeryError, match=r"temperature to be a number from .* Received None"):
        lm.compile(sampler=Bare())


@pytest.mark.parametrize("number", [True, "1", np.bool_(True), [1.0], np.nan])
def test_what_is_no_number_is_no_temperature(lm, number):
    with pytest.raises(bs.SurgeryError, match="temperature to be a number"):
        lm.compile(sampler=keras_hub.samplers.RandomSampler(temperature=number))


@pytest.mark.slow
def test_numpy_numbers_are_numbers(lm, prompt):
    for name, integer in (("top_k", "k"), ("beam", "num_beams")):
        sampler = SAMPLERS[name]()
        wanted = anew(lm, prompt, sampler)
        sampler = SAMPLERS[name]()
        setattr(sampler, integer, np.int64(getattr(sampler, integer)))
        sampler.temperature = np.float64(1)
        assert np.array_equal(anew(lm, prompt, sampler), wanted)


# Logits that are no numbers


def strategy_of(name):
    return make_strategy(SAMPLERS[name]())


@pytest.mark.by_default(1)
@pytest.mark.parametrize("vocabulary", [7, 50257])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_row_without_a_choice_gets_no_token(name, vocabulary, rng):
    strategy = strategy_of(name)
    logits = rng.normal(size=(9, vocabulary)).astype("float32")
    logits[1] = np.nan
    logits[2, vocabulary // 2] = np.nan
    logits[3, 0] = np.nan
    logits[4, vocabulary - 1] = np.nan
    logits[5] = -np.inf
    logits[6, 3] = np.inf
    logits[7] = -np.inf
    logits[7, 5] = -8.0  # all others are masked
    logits[8] = np.nan
    done = np.repeat(np.arange(9) == 8, strategy.width)
    seeds = np.zeros((9, 2), np.uint32)
    rows = jnp.repeat(jnp.asarray(logits), strategy.width, axis=0)
    tokens, *_ = strategy.choose(rows, done, strategy.start(seeds), strategy.settings())
    tokens = np.asarray(tokens).reshape(9, strategy.width)
    assert (tokens[0] >= 0).all()
    assert (tokens[1:7] == NO_TOKEN).all()
    assert tokens[7, 0] == 5
    assert (tokens[8] == 0).all()


@pytest.fixture(scope="module")
def broken():
    """A model whose weights are no numbers from position 9 on."""
    backbone = make_gpt2(num_layers=1)
    layer = next(x for x in backbone.layers if "position_embedding" in x.name)
    table = np.asarray(layer.position_embeddings).copy()
    table[9] = np.nan
    layer.position_embeddings.assign(table)
    return bs.CachedCausalLM(backbone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["greedy", *(pytest.param(x, marks=pytest.mark.slow) for x in DRAWING), "beam"],
)
def test_row_and_step_are_named(broken, rng, name):
    broken.compile(sampler=SAMPLERS[name]())
    inputs = ragged(rng, (3, 7), 7)
    fine = broken.generate(inputs, max_length=10, stop_token_ids=None, seed=1)
    assert fine["padding_mask"].all()
    options = {"max_length": 12, "seed": 1}
    for chunks in (None, [[59] * 3]):
        with pytest.raises(bs.SurgeryError, match=r"at row 0, step 7: expected logits .* NaN"):
            broken.generate(inputs, stop_token_ids=None, stop_sequences=chunks, **options)
    with pytest.raises(bs.SurgeryError, match="at row 1, step 3:"):
        broken.generate(inputs, stop_token_ids=None, max_new_tokens=4, seed=1, batch_size=1)
    # A row that ends before is not concerned.
    ends = [int(x) for x in fine["token_ids"][[0, 1], [3, 7]]]
    stopped = broken.generate(
        inputs, stop_sequences=[[e] for e in ends], stop_token_ids=None, **options
    )
    assert stopped["padding_mask"].sum(axis=1).tolist() == [4, 8]


def test_a_strength_that_is_too_large(rng):
    lm = bs.CachedCausalLM(
        bs.operate(make_gpt2(num_layers=1), [bs.Steer("mood", {0: np.full(32, 1e3)})])
    )
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (3, 7), 7)
    options = {"max_new_tokens": 4, "stop_token_ids": None}
    with pytest.raises(bs.SurgeryError, match="at row 1, step 0: expected logits"):
        lm.generate(inputs, controls={"mood": [1.0, 3e38]}, **options)
    lm.generate(inputs, controls={"mood": [1.0, -1.0]}, **options)


def test_threads_that_ask_at_once_draw_seeds_of_their_own():
    sampler, interval = keras_hub.samplers.RandomSampler(seed=1), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            drawn = list(
                pool.map(lambda _: resolve_seeds(None, 1, sampler, "generate")[0, 0], range(200))
            )
    finally:
        sys.setswitchinterval(interval)
    assert len(set(drawn)) == len(drawn)
