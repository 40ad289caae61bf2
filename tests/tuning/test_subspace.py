"""Directions that carry a planted difference are found; what they do is patching by hand."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2
from tests.recurrent import RECURRENT

SIZE, VOCABULARY, LEFT, RIGHT = 32, 60, 1, 2
SITE = "blocks.0"


def planted(**options):
    """Return a model that tells by one direction which side the last token is on, and that.

    Its blocks add nothing, and positions neither. Also: the side of each token.
    """
    rng = np.random.default_rng(0)
    backbone = make_gpt2(num_layers=2, **options)
    assert (backbone.hidden_dim, backbone.vocabulary_size) == (SIZE, VOCABULARY)
    told = rng.normal(size=SIZE)
    told = (told - told.mean()) / np.linalg.norm(told - told.mean())
    content = 0.5 * rng.normal(size=(VOCABULARY, SIZE))
    content -= content.mean(axis=1, keepdims=True)
    content -= np.outer(content @ told, told)
    side = np.where(np.arange(VOCABULARY) % 2, 1, -1)
    table = content + np.outer(side, told)
    table[[LEFT, RIGHT]] = 20 * told, -20 * told
    for variable in backbone.variables:
        writes = "attention_output" in variable.path or "feedforward_output" in variable.path
        if writes or "position_embedding" in variable.path:
            variable.assign(np.zeros(variable.shape))
    backbone.token_embedding.embeddings.assign(table)
    return bs.CachedCausalLM(backbone), told, side


def examples_of(side, count, rng):
    texts = [rng.integers(10, VOCABULARY, rng.integers(3, 7)).tolist() for _ in range(2 * count)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [(a, b, LEFT if side[b[-1]] > 0 else RIGHT) for a, b in pairs]


def next_token(lm, text, controls=None):
    lm.compile(sampler="greedy")
    inputs = {"token_ids": np.array([text]), "padding_mask": np.ones((1, len(text)), bool)}
    made = lm.generate(inputs, controls=controls, max_new_tokens=1, stop_token_ids=None)
    return made["token_ids"][0, len(text)]


def last_state(lm, text):
    edited = bs.operate(lm.opened, [bs.Capture(SITE, name="seen")])
    ids = np.array([text])
    outputs = edited.predict_on_batch({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    return np.asarray(outputs["captures"][f"seen/{SITE}"])[0, -1]


@pytest.fixture(scope="module")
def found():
    lm, told, side = planted()
    examples = examples_of(side, 400, np.random.default_rng(1))
    return lm, told, side, bs.find_subspace(lm, examples, SITE, learning_rate=0.03)


@pytest.mark.slow
def test_a_planted_direction_is_found(found):
    _, told, _, got = found
    assert abs(got.directions @ told) > 0.9
    assert got.accuracy >= 0.95
    assert got.whole == 1
    assert 0.3 < got.unpatched < 0.7


@pytest.mark.slow
def test_what_was_found_works_in_generation_as_patched_by_hand(found):
    """By a `Patch` of the whole, of values that are projected by hand."""
    lm, _, side, got = found
    along = bs.CachedCausalLM(bs.operate(lm.opened, [got.patch()]))
    whole = bs.CachedCausalLM(bs.operate(lm.opened, [bs.Patch(SITE)]))
    right = []
    for base, source, label in examples_of(side, 12, np.random.default_rng(2)):
        here, there = last_state(lm, base), last_state(lm, source)
        onto = got.directions.T @ got.directions
        patches = [there, here + onto @ (there - here)]
        answers = [
            next_token(model, base, {"patch": {"positions": [len(base) - 1], "values": [value]}})
            for model, value in zip((along, whole), patches, strict=True)
        ]
        assert answers[0] == answers[1]
        right.append(answers[0] == label)
    assert np.mean(right) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 3])
def test_directions_are_orthonormal_and_the_model_is_as_it_was(rank):
    lm, _, side = planted(dtype="bfloat16")
    before = [keras.ops.convert_to_numpy(v) for v in lm.backbone.variables]
    examples = examples_of(side, 8, np.random.default_rng(1))
    got, again = (bs.find_subspace(lm, examples, SITE, rank, steps=3) for _ in range(2))
    np.testing.assert_allclose(got.directions @ got.directions.T, np.eye(rank), atol=1e-5)
    np.testing.assert_array_equal(got.directions, again.directions)
    for variable, value in zip(lm.backbone.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert all(v.trainable for v in lm.backbone.variables)


@pytest.mark.slow
def test_edits_of_the_model_act_by_their_controls():
    """A model steered so far to one side that nothing else counts, row by row."""
    lm, told, side = planted()
    steer = bs.Steer("push", {1: 50 * told}, strength=0.0, tokens="last")
    lm = bs.CachedCausalLM(bs.operate(lm.opened, [steer]))
    rng = np.random.default_rng(1)
    examples = [(a, b, LEFT) for a, b, _ in examples_of(side, 16, rng)]
    pushed = bs.find_subspace(lm, examples, SITE, steps=2, controls={"push": np.ones(16)})
    assert (pushed.accuracy, pushed.whole, pushed.unpatched) == (1, 1, 1)
    assert bs.find_subspace(lm, examples, SITE, steps=2).whole < 1


@pytest.mark.slow
@pytest.mark.slow
def test_directions_at_a_site_with_a_number_for_each_head():
    lm = bs.CachedCausalLM(RECURRENT["qwen3_5"].make())
    examples = [([1, 2, i], [1, 3, i], 7) for i in range(4, 12)]
    found = bs.find_subspace(lm, examples, "blocks.0.decay", positions=1, steps=2)
    assert found.directions.shape == (1, 4)
    edited = bs.operate(lm.backbone, [found.patch()])
    assert "patch_heads" not in edited.control_inputs


def test_positions_are_those_of_base_and_source():
    """A source whose last token is of the other side: what counts is where it is read."""
    lm, _, side = planted()
    rng = np.random.default_rng(1)
    examples = [
        (a, [*b, 11 if side[b[-1]] < 0 else 12], label)
        for a, b, label in examples_of(side, 16, rng)
    ]
    where = [[len(a) - 1, len(b) - 2] for a, b, _ in examples]
    assert bs.find_subspace(lm, examples, SITE, steps=2, positions=where).whole == 1
    assert bs.find_subspace(lm, examples, SITE, steps=2, positions=-1).whole == 0
    # One number for base and source, another in each example: the sources go on after it.
    examples = [
        (base, [*(base[:-1] + source)[: len(base) - 1], source[-1], *base], label)
        for base, source, label in examples_of(side, 32, rng)
        if (side[base[-1]] > 0) != (label == LEFT)
    ]
    one = [len(base) - 1 for base, *_ in examples]
    assert len({*one}) > 2
    assert bs.find_subspace(lm, examples, SITE, steps=2, positions=one).whole == 1
    assert bs.find_subspace(lm, examples, SITE, steps=2, positions=[p - 1 for p in one]).whole == 0


def test_bad_input_is_refused():
    lm, _, side = planted()
    examples = examples_of(side, 4, np.random.default_rng(1))
    for change, words in [
        ({"examples": examples[:3]}, r"at 'examples': expected at least 4 of \(base text, sour"),
        ({"examples": [pair[:2] for pair in examples]}, "at 'examples': expected at least 4"),
        ({"examples": [(a, b, 60) for a, b, _ in examples]}, "an id from 0 to 59. Received 60"),
        ({"at": "blocks.*"}, r"one site with more than 1 numbers .* picks \{'blocks.0': \[32\]"),
        ({"at": "blocks.0.head_outputs"}, "at 'at': expected one site"),
        ({"at": 3}, r"at 'at': expected one site .* Received 3, which picks \{\}"),
        ({"rank": 32}, "expected one site with more than 32 numbers"),
        (
            {"rank": 0},
            "at 'rank': expected a positive int. Received 0. Pass a number of directions",
        ),
        ({"seed": -1}, "find_subspace at 'seed': expected an integer from 0"),
        ({"steps": 0}, "at 'steps': expected"),
        ({"learning_rate": 0}, "at 'learning_rate': expected a number above 0"),
        ({"positions": 9}, "at 'positions': expected positions of tokens that the texts have"),
        ({"positions": [0, 1]}, r"an int, int\[4\] or int\[4, 2\]. Received \[0, 1\]"),
        ({"positions": 0.5}, "at 'positions': expected positions"),
        ({"controls": {"mood": 1}}, "find_subspace"),
    ]:
        with pytest.raises(bs.SurgeryError, match=words):
            bs.find_subspace(lm, **{"examples": examples, "at": SITE, "steps": 1, **change})
    with pytest.raises(
        bs.SurgeryError, match=r"Patch at 'blocks.0': .* \[32\]. Received .* size 8"
    ):
        bs.operate(lm.opened, [bs.Patch(SITE, directions=np.ones(8))])
    with pytest.raises(bs.SurgeryError, match="`directions` to be finite"):
        bs.Patch(SITE, directions=np.zeros(32))
