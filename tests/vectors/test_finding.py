"""The condition that is found: by brute force in NumPy, and as a `Condition` applies it."""

import itertools

import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import FAMILIES, make_deep_gpt2

RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(1, 60, RNG.integers(3, 9)) for _ in range(9)]
POSITIVES, NEGATIVES = TEXTS[:4], TEXTS[4:]


def vector(size=32, blocks=(0, 1)):
    return bs.ControlVector({block: RNG.normal(size=size) for block in blocks})


def cosines(lm, text, path, direction, start, stop):
    ids = np.array([text])
    edited = bs.operate(lm.opened, [bs.Capture(path)])
    out = edited({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    states = np.asarray(out["captures"][path], "float64")[0, start:stop]
    return states @ direction / np.linalg.norm(states, axis=1) / np.linalg.norm(direction)


def best_by_force(lm, v, start=0, stop=None, at="blocks.{}"):
    """Return the largest F1, and the widest gap that has it, over all that may be tried."""
    found = []
    for block, direction in v.directions.items():
        rows = [cosines(lm, t, at.format(block), direction, start, stop) for t in TEXTS]
        for way in (np.max, lambda c: np.max(-c), lambda c: np.max(np.abs(c))):
            values = np.array([way(row) for row in rows])
            for low, high in itertools.pairwise(np.sort(values)):
                met = values > (low + high) / 2
                right = met[:4].sum()
                precision, recall = right / met.sum(), right / 4
                f1 = 2 * precision * recall / (precision + recall) if right else 0.0
                found.append((round(f1, 6), high - low))
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "start"), [("last", -1), ("prompt", 0), ((1, None), 1)])
def test_the_best_of_all_by_force(tokens, start):
    lm, v = bs.CachedCausalLM(make_deep_gpt2()), vector()
    found = bs.find_condition(lm, v, POSITIVES, NEGATIVES, tokens=tokens, batch_size=4)
    f1, gap = best_by_force(lm, v, start)
    assert abs(found.f1 - f1) <= 1e-5
    assert max(found.f1_by_site.values()) == found.f1
    assert list(found.f1_by_site) == ["blocks.0", "blocks.1"]
    values = []
    for text in TEXTS:
        row = cosines(lm, text, found.at, found.vector, start, None)
        values.append(max(row if found.signed else np.abs(row)))
    distance = np.abs(np.array(values) - found.threshold)
    assert abs(2 * distance.min() - gap) <= 1e-4
    met = np.array(values) > found.threshold
    steer = bs.Steer("mood", {2: RNG.normal(size=32)}, when="seen")
    edits = [found.condition("seen"), steer, bs.Capture("blocks.2")]
    steered = bs.CachedCausalLM(bs.operate(lm.backbone, edits))
    steered.compile(sampler="greedy")
    for text, wanted in zip(TEXTS, met, strict=True):
        prompt = {"token_ids": [text], "padding_mask": np.ones((1, len(text)))}
        options = {"max_new_tokens": 0, "stop_token_ids": None, "return_captures": True}
        got = steered.generate(prompt, **options)[1]["blocks.2"]
        plain = steered.generate(prompt, controls={"mood": 0}, **options)[1]["blocks.2"]
        assert (not np.array_equal(got, plain)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "qwen3_5"])
def test_other_families_and_sites(name):
    make = FAMILIES.get(name) or ROWS[name].make
    lm = bs.CachedCausalLM(make(num_layers=3) if name == "gemma2" else make())
    v = vector(lm.backbone.hidden_dim, (0,))
    found = bs.find_condition(lm, v, POSITIVES, NEGATIVES, at="blocks.*.attention_output", before=1)
    assert found.at == "blocks.0.attention_output"
    wanted = best_by_force(lm, v, at="blocks.{}.attention_output")[0]
    assert abs(found.f1 - wanted) <= 1e-5


def test_a_vector_that_points_the_other_way_is_turned_round():
    lm, v = bs.CachedCausalLM(make_deep_gpt2()), vector()
    found = [bs.find_condition(lm, s * v, POSITIVES, NEGATIVES, before=1) for s in (1, -1)]
    assert found[0].f1 == found[1].f1
    assert found[0].threshold == pytest.approx(found[1].threshold)
    assert found[0].signed
    assert np.array_equal(found[0].vector, found[1].vector)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: bs.find_condition(lm, 3, [[1, 2]], [[3, 4]]), "expected a ControlVector"),
        (lambda lm: bs.find_condition(lm, vector(8), [[1, 2]], [[3, 4]]), "a vector of size 32"),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], []),
            "find_condition: expected a list of texts",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[1, 2]]),
            "expected texts that differ along the vector",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3]], tokens=(1, None)),
            r"a range that each text has tokens in. Received \(1, None\), and a text of 1",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3, 4]], tokens="generated"),
            "'tokens': expected a range",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(blocks=(2,)), [[1, 2]], [[3, 4]]),
            r"a direction for one of the blocks before 2. .* for blocks \[2\]",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3, 4]], at="blocks.*.*_output"),
            "expected one site in each block",
        ),
        (
            lambda lm: bs.find_condition(lm.backbone, vector(), [[1, 2]], [[3, 4]]),
            "find_condition: expected a `CachedCausalLM`",
        ),
        (
            lambda lm: bs.find_condition(
                lm, vector(), [[1, 2]], [[3, 4]], at="blocks.*.mlp_hidden"
            ),
            r"'blocks.0.mlp_hidden': expected sites of .* \[32\]. Received \[64\]",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3, 4]], at="blocks.*.query"),
            r"'blocks.0.query': expected sites of .* Received \[4, 8\]",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3, 4]], before=3),
            "'before': expected a block from 1 to 2. Received 3",
        ),
        (
            lambda lm: bs.find_condition(lm, vector(), [[1, 2]], [[3, 4]], batch_size=0),
            "a positive int",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(bs.SurgeryError, match=words):
        call(bs.CachedCausalLM(make_deep_gpt2()))


def test_texts_that_no_condition_singles_out_are_refused(monkeypatch):
    """The first kind is the least similar in each way: a condition would meet the second alone."""
    low = np.array([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]], "float32")
    monkeypatch.setattr(
        "backbone_surgery.vectors.finding.measure", lambda *_, **__: {"blocks.0": low[:, :, None]}
    )
    lm, v = bs.CachedCausalLM(make_deep_gpt2()), vector(blocks=(0,))
    with pytest.raises(bs.SurgeryError, match="some of the first kind more similar to it"):
        bs.find_condition(lm, v, [[1, 2]], [[3, 4], [5, 6]])
