"""Penalties: the tokens are those that NumPy chooses, of logits that it computes itself."""

import contextlib
import pickle
from dataclasses import replace
from unittest import mock

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.penalties import (
    Penalized,
    biases_of,
    past_of,
    penalized,
    seen_in,
)
from backbone_surgery.generation.samplers import Greedy
from tests.helpers import ragged
from tests.numpy_models import Model, weights_of
from tests.serving.traffic import VOCABULARY, random_gpt2

NEW = 14
CASES = {
    "repetition": bs.Penalties(1.4),
    "reward": bs.Penalties(repetition=0.8),
    "presence": bs.Penalties(presence=1.5),
    "frequency": bs.Penalties(frequency=0.7),
    "bias": bs.Penalties(bias={3: 4.0, 17: -100, 59: 1.5}),
    "all": bs.Penalties(1.2, presence=-0.5, frequency=0.9, bias={i: i / 20 for i in range(40)}),
}


@pytest.fixture(scope="module")
def lm():
    lm = bs.CachedCausalLM(random_gpt2(np.random.default_rng(3)))
    lm.compile(sampler="greedy")
    return lm


def changed(logits, prompt, new, penalties):
    """Return logits [vocabulary] after penalties, token by token as `Penalties` says."""
    result = logits.astype("float32").copy()
    for token in range(len(logits)):
        x = np.float32(result[token] + np.float32(dict(penalties.bias).get(token, 0)))
        if token in prompt or token in new:
            factor = np.float32(penalties.repetition)
            x = x / factor if x > 0 else x * factor
        count = list(new).count(token)
        result[token] = x - penalties.frequency * count - penalties.presence * (count > 0)
    return result


def by_hand(lm, prompt, penalties, choose=np.argmax):
    """Return the new tokens of one row, each chosen of logits of NumPy's own model."""
    new, model = [], Model(lm.backbone)
    table = weights_of(lm.backbone.token_embedding)[0]
    for _ in range(NEW):
        logits = model(np.array([[*prompt, *new]]))[0, -1] @ table.T
        new.append(int(choose(changed(logits, prompt, new, penalties))))
    return new


def rows_of(inputs):
    return [
        [int(i) for i in ids[mask.astype(bool)]]
        for ids, mask in zip(inputs["token_ids"], inputs["padding_mask"], strict=True)
    ]


@pytest.mark.by_default(3)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_numpys(lm, rng, case):
    inputs = ragged(rng, [3, 9, 6], 9, VOCABULARY)
    made = lm.generate(
        inputs, max_new_tokens=NEW, stop_token_ids=None, penalties=CASES[case], strip_prompt=True
    )
    for prompt, new in zip(rows_of(inputs), rows_of(made), strict=True):
        assert new == by_hand(lm, prompt, CASES[case])


@pytest.mark.slow
def test_a_sampler_draws_of_what_is_left(lm, rng):
    """KerasHub's own sampler draws the same tokens of NumPy's logits."""
    inputs = ragged(rng, [4, 7], 7, VOCABULARY)
    penalties = CASES["all"]
    with compiled(lm, keras_hub.samplers.TopPSampler(p=0.8, k=30, seed=5)):
        made = lm.generate(
            inputs,
            max_new_tokens=NEW,
            stop_token_ids=None,
            penalties=penalties,
            seed=5,
            strip_prompt=True,
        )
    for prompt, new in zip(rows_of(inputs), rows_of(made), strict=True):
        sampler = keras_hub.samplers.TopPSampler(p=0.8, k=30, seed=5)

        def draw(logits, sampler=sampler):
            return sampler.get_next_token(sampler.compute_probabilities(logits[None]))[0]

        assert new == by_hand(lm, prompt, penalties, draw)


@pytest.mark.slow
def test_hugging_face_has_the_same_logits(rng):
    processors = pytest.importorskip("transformers").generation.logits_process
    torch = pytest.importorskip("torch")
    ids = rng.integers(0, VOCABULARY, (2, 8))
    logits = rng.normal(size=(2, VOCABULARY)).astype("float32")
    processor = processors.RepetitionPenaltyLogitsProcessor(1.3)
    wanted = processor(torch.tensor(ids), torch.tensor(logits)).numpy()
    past = past_of(jax.numpy.array(ids), jax.numpy.array([5, 5]), 5, 8)
    penalties = bs.Penalties(1.3).arrays()
    tables = seen_in(past, VOCABULARY), biases_of(penalties, VOCABULARY)
    got = penalized(jax.numpy.array(logits), penalties, *tables)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert (wanted != logits).any()


def test_only_the_first_token_writes_single_numbers_to_tables():
    """At each step that would be slow on a TPU."""
    strategy = Penalized(Greedy(), CASES["all"], "generate")
    logits, done = np.zeros((2, VOCABULARY), "float32"), np.zeros(2, bool)
    past = past_of(jax.numpy.zeros((2, 8), int), jax.numpy.array([5, 3]), 5, 5)
    settings = {**strategy.settings(), "past": past}
    state = strategy.start(np.zeros((2, 2), np.uint32))
    first = jax.make_jaxpr(strategy.choose)(logits, done, state, settings)
    _, _, state = strategy.choose(logits, done, state, settings)
    later = jax.make_jaxpr(strategy.choose)(logits, done, state, settings)
    assert ["scatter" in str(program) for program in (first, later)] == [True, False]


def test_tables_of_all_tokens_are_not_copied_after_each_call(lm, rng):
    inputs, copied = ragged(rng, [5], 5, VOCABULARY), []
    decode = lm.programs.decode

    def spied(*args, **options):
        state, copies = decode(*args, **options)
        copied.append((state["draws"].keys(), copies["draws"].keys()))
        return state, copies

    with mock.patch.object(lm.programs, "decode", spied):
        lm.generate(inputs, max_new_tokens=9, stop_token_ids=None, penalties=CASES["presence"])
    assert copied == [({"of", "seen", "biases"}, set())]


@pytest.mark.parametrize("neutral", [None, bs.Penalties(), bs.Penalties(bias={3: 0.0})])
def test_none_is_no_other_program(lm, rng, neutral):
    inputs = ragged(rng, [5], 5, VOCABULARY)
    wanted = lm.generate(inputs, max_new_tokens=NEW, stop_token_ids=None)
    before = lm.programs.compilations
    got = lm.generate(inputs, max_new_tokens=NEW, stop_token_ids=None, penalties=neutral)
    assert lm.programs.compilations == before
    assert np.array_equal(got["token_ids"], wanted["token_ids"])


def test_other_numbers_compile_nothing(lm, rng):
    inputs = ragged(rng, [5], 5, VOCABULARY)
    asked = {"max_new_tokens": NEW, "stop_token_ids": None}
    texts = [lm.generate(inputs, **asked, penalties=bs.Penalties(1.01))["token_ids"].tolist()]
    before = lm.programs.compilations
    for penalties in CASES.values():
        texts.append(lm.generate(inputs, **asked, penalties=penalties)["token_ids"].tolist())
    assert lm.programs.compilations == before
    assert len({str(text) for text in texts}) > 3


@contextlib.contextmanager
def compiled(lm, sampler):
    lm.compile(sampler=sampler)
    try:
        yield
    finally:
        lm.compile(sampler="greedy")


@pytest.mark.slow
def test_pieces_are_those_of_the_whole_text():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="top_p")
    asked = {"max_new_tokens": 30, "seed": 3, "penalties": bs.Penalties(1.3, frequency=0.5)}
    prompt = "Once upon a time there was"
    wanted = lm.generate(prompt, **asked)
    assert "".join(lm.stream(prompt, **asked)) == wanted
    assert wanted != lm.generate(prompt, max_new_tokens=30, seed=3)
    row = bs.Engine(lm, rows=2, length=64).submit(
        prompt, **asked, temperature=1.0, top_p=lm.sampler.p, top_k=lm.sampler.k or 0
    )
    assert row.result() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("captures", [False, True])
def test_an_engine_chooses_as_it_does_alone(lm, rng, captures):
    """Beside rows without, after chunks of a prompt, drawn and not."""
    edited = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Capture("blocks.0")]))
    edited.compile(sampler="greedy")
    engine = bs.Engine(edited, rows=2, length=96, prefill_chunk=16, chunk_size=4)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in (40, 5, 21, 3, 17, 33)]
    asked = [{"penalties": p} for p in [*CASES.values()]]
    asked[1], asked[4] = {}, {**asked[4], "temperature": 0.9, "seed": 4}
    requests = [
        engine.submit(
            {"token_ids": np.array([prompt]), "padding_mask": np.ones((1, len(prompt)))},
            max_new_tokens=NEW,
            stop_token_ids=None,
            return_captures=captures and i % 2 == 0,
            **options,
        )
        for i, (prompt, options) in enumerate(zip(prompts, asked, strict=True))
    ]
    for prompt, options, request in zip(prompts, asked, requests, strict=True):
        request.result()
        if "temperature" not in options:
            wanted = by_hand(lm, prompt, options.get("penalties", bs.Penalties()))
            assert request.token_ids.tolist() == wanted
            continue
        with compiled(edited, keras_hub.samplers.RandomSampler(temperature=0.9)):
            alone = edited.generate(
                {"token_ids": np.array([prompt]), "padding_mask": np.ones((1, len(prompt)))},
                max_new_tokens=NEW,
                stop_token_ids=None,
                seed=4,
                penalties=options["penalties"],
                strip_prompt=True,
            )
        assert request.token_ids.tolist() == rows_of(alone)[0]


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_model(lm):
    """Not of what penalties make of its logits."""
    engine = bs.Engine(lm, rows=1, length=64)
    ids = np.array([[1, 2, 3]])
    request = engine.submit(
        {"token_ids": ids, "padding_mask": np.ones_like(ids)},
        max_new_tokens=5,
        stop_token_ids=None,
        logprobs=True,
        penalties=CASES["bias"],
    )
    request.result()
    tokens = [1, 2, 3, *request.token_ids]
    logits = np.asarray(lm.score(np.array([tokens])))[0]
    wanted = np.asarray(jax.nn.log_softmax(logits))[range(2, 7), tokens[3:]]
    np.testing.assert_allclose(request.logprobs.logprobs, wanted, atol=1e-4)


def test_a_data_set_has_them_in_its_manifest(lm, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3]}\n{"prompt": [4]}\n')

    def run(**options):
        asked = {"max_new_tokens": NEW, "stop_token_ids": None, "verbose": 0, **options}
        [path] = bs.generate_dataset(lm, tmp_path / "in.jsonl", tmp_path / "out", **asked)
        return path.read_text()

    written = run(penalties=CASES["all"])
    assert str(by_hand(lm, [1, 2, 3], CASES["all"])) in written
    assert run(penalties=CASES["all"]) == written
    for other in (None, bs.Penalties(1.2)):
        with pytest.raises(bs.SurgeryError, match=r"differs in: options\.penalties"):
            run(penalties=other)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: bs.Penalties(0),
            "at 'repetition': expected a number from 0.01 to 100. Received 0",
        ),
        (lambda: bs.Penalties("1.1"), "at 'repetition'"),
        (lambda: bs.Penalties(presence=2.1), "at 'presence': expected a number from -2 to 2"),
        (lambda: bs.Penalties(frequency=float("nan")), "at 'frequency'"),
        (lambda: bs.Penalties(bias={"a": 1}), r"at 'bias': expected \{token id: number"),
        (lambda: bs.Penalties(bias={-1: 1}), "at 'bias'"),
        (lambda: bs.Penalties(bias={1: 101}), "at 'bias'"),
        (lambda: bs.Penalties(bias={1: None}), "at 'bias'"),
        (lambda: bs.Penalties(bias=[1, 2]), "at 'bias'"),
        (lambda: bs.Penalties(bias=((1, 2), (1, 3))), "at 'bias'"),
        (lambda: bs.Penalties(bias=(1, 2)), "at 'bias'"),
        (lambda: bs.Penalties(bias=dict.fromkeys(range(301), 0)), "at 'bias'.* at most 300 tokens"),
    ],
)
def test_what_is_no_penalty(make, words):
    with pytest.raises(bs.SurgeryError, match=f"^Penalties {words}"):
        make()


def test_penalties_are_values():
    """That do not change after they were checked; zeros do not count."""
    given = {7: 1, np.int64(3): np.float32(2)}
    penalties = bs.Penalties(1.2, bias=given)
    given[99] = 1e9
    assert penalties.bias == ((3, 2.0), (7, 1.0))
    same = bs.Penalties(1.2, bias={3: 2.0, 7: 1.0, 8: 0})
    assert (penalties, hash(penalties)) == (same, hash(same))
    assert pickle.loads(pickle.dumps(penalties)) == penalties
    assert replace(penalties, presence=1) == bs.Penalties(1.2, 1, bias={3: 2, 7: 1})


def test_a_data_set_by_beams_is_refused_before_anything_is_written(lm, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    asked = {"max_new_tokens": 3, "stop_token_ids": None, "verbose": 0}
    words = "^generate_dataset at 'penalties': .*beam search"
    with compiled(lm, "beam"), pytest.raises(bs.SurgeryError, match=words):
        bs.generate_dataset(
            lm, tmp_path / "in.jsonl", tmp_path / "out", **asked, penalties=bs.Penalties(1.2)
        )
    assert not (tmp_path / "out").exists()


def test_what_is_refused(lm):
    ids = {"token_ids": np.array([[1, 2]]), "padding_mask": np.ones((1, 2))}
    asked = {"max_new_tokens": 3, "stop_token_ids": None}
    with mock.patch.object(jax.stages.Lowered, "compile") as compiles:
        for penalties, words in (
            (1.1, r"^generate at 'penalties': expected `bs.Penalties`.*Received 1.1"),
            (bs.Penalties(bias={60: 1}), "token ids from 0 to 59. Received 60"),
        ):
            with pytest.raises(bs.SurgeryError, match=words):
                lm.generate(ids, **asked, penalties=penalties)
            words = words.replace("generate", "submit")
            with pytest.raises(bs.SurgeryError, match=words):
                bs.Engine(lm).submit(ids, **asked, penalties=penalties)
        with pytest.raises(bs.SurgeryError, match=r"at 'lookup': .*Received `penalties`"):
            lm.generate(ids, **asked, penalties=bs.Penalties(1.1), lookup=4)
        with compiled(lm, "beam"), pytest.raises(bs.SurgeryError, match="beam search"):
            lm.generate(ids, **asked, penalties=bs.Penalties(1.1))
    compiles.assert_not_called()
    assert Penalized(Greedy(), bs.Penalties(1.1), "generate").key != Greedy.key
