"""What is learned from pairs: each edit by itself, by the tokens that differ."""

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.tuning.candidates import Candidate, Interventions, block_sets
from backbone_surgery.tuning.judging import Perplexity
from backbone_surgery.tuning.learned import learned_vector
from backbone_surgery.tuning.learning import learn, losses_of, pack_texts
from backbone_surgery.tuning.result import Trial
from backbone_surgery.vectors.norms import residual_norms
from tests.helpers import make_gpt2

PAIRS = [([5, 9, 11, 12, 13], [5, 9, 21, 22]), ([6, 9, 11, 14, 15], [6, 9, 23, 24, 25, 26])]
SIZE = {0: 2.0, 1: 3.0}


def mean_loss(lm, rows, first, **controls):
    """Return the loss of the tokens from one on, by the logits of the edited graph."""
    total, count = 0.0, 0
    for row in rows:
        ids = np.zeros((1, 16), "int32")  # every row by one program
        ids[0, : len(row)] = row
        given = {name: np.array([x], "float32") for name, x in controls.items()}
        logits = np.asarray(lm.score(ids, controls=given), "float64")[0]
        for i in range(first, len(row)):
            x = logits[i - 1]
            total += np.log(np.exp(x - x.max()).sum()) + x.max() - x[row[i]]
            count += 1
    return total / count


@pytest.mark.slow
def test_losses_are_those_of_the_logits(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    rows = [rng.integers(1, 60, n).astype("int32") for n in (3, 9)]
    losses = losses_of(lm.opened).predict_on_batch(pack_texts(rows, 16))
    for row, own in zip(rows, losses, strict=True):
        wanted = mean_loss(lm, [row.tolist()], 1)
        assert own[: len(row) - 1].mean() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_both_sides_become_likelier_and_the_rest_is_frozen():
    backbone = make_gpt2()
    before = bs.weights_digest(backbone)
    zero = {1: np.zeros(32)}
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", zero, trainable=True)]))
    sides = [[pair[i] for pair in PAIRS] for i in (0, 1)]
    start = [mean_loss(lm, side, 2) for side in sides]
    learn(
        bs.CachedCausalLM(backbone),
        lm.opened,
        PAIRS,
        {"mood_strength": np.ones((1, 1), "float32")},
        steps=30,
        learning_rate=0.1,
    )
    for sign, side, wrong in zip((1.0, -1.0), sides, sides[::-1], strict=True):
        own = mean_loss(lm, side, 2, mood_strength=[sign])
        assert own < start[sides.index(side)] - 0.1
        assert own < mean_loss(lm, side, 2, mood_strength=[-sign]) - 0.2
        assert mean_loss(lm, wrong, 2, mood_strength=[sign]) > start[sides.index(wrong)]
    assert bs.weights_digest(backbone) == before


@pytest.mark.slow
def test_a_direction_is_learned_by_itself_and_stays_short():
    """Alone, a block learns what it learns among others: the same rows, and no other strength."""
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    vector = learned_vector("learned", lm, PAIRS, SIZE, {"steps": 400, "seed": 0})
    norms = {b: np.linalg.norm(d) for b, d in vector.directions.items()}
    assert max(norms.values()) == pytest.approx(0.5, rel=1e-4)
    for block, size in SIZE.items():
        own = {block: size * vector.directions[block]}
        edited = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Steer("mood", own)]))
        for sign, i in ((1.0, 0), (-1.0, 1)):
            side = [pair[i] for pair in PAIRS]
            assert mean_loss(edited, side, 2, mood_strength=[sign]) < mean_loss(lm, side, 2)


def test_a_direction_has_a_limit_only_where_it_is_learned():
    with pytest.raises(bs.SurgeryError, match="expected `max_norm` above 0, of a trainable Steer"):
        bs.Steer("mood", {0: np.ones(4)}, max_norm=1.0)
    with pytest.raises(bs.SurgeryError, match="expected `max_norm` above 0, of a trainable Steer"):
        bs.Steer("mood", {0: np.ones(4)}, trainable=True, max_norm=0.0)


def test_blocks_to_try():
    assert block_sets(1) == [(0,)]
    assert block_sets(6)[6:] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 5),
    ]
    for count in (12, 26, 48):
        sets = block_sets(count)
        assert len(set(sets)) == len(sets) < 2 * count + 6
        assert {b for blocks in sets for b in blocks} == set(range(count))


def test_the_score_is_a_harmonic_mean():
    trial = Trial(Candidate("mean_diff", (1,), 0.2), 0.9, 0.2, 0.6, 4)
    assert trial.score == pytest.approx(3 / (1 / 0.9 + 1 / 0.8 + 1 / 0.6))
    assert Trial(None, 0.5, 1.0, 1.0, 4).score == 0


@pytest.mark.slow
def test_perplexity_is_of_the_continuation_alone():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    prompts, texts = ["Tom had a ball.", "Lily"], [" It was red.", " was sad and she cried."]
    got = Perplexity(lm, 2).losses(prompts, texts)
    for prompt, text, loss in zip(prompts, texts, got, strict=True):
        ids = [0, *np.asarray(lm.preprocessor.tokenizer(prompt + text)).tolist()]
        ids[0] = lm.preprocessor.tokenizer.start_token_id
        start = 1 + len(np.asarray(lm.preprocessor.tokenizer(prompt)))
        assert loss == pytest.approx(mean_loss(lm, [ids], start), rel=1e-4)
    random = Perplexity(lm, 2).losses(["Tom had"], [" sad ball the the it was Lily had"])
    assert random[0] > got[0] + 1


def test_a_vector_apart_from_others(rng):
    own, *others = (
        bs.ControlVector({0: rng.normal(size=8), 2: rng.normal(size=8)}) for _ in range(3)
    )
    apart = own.orthogonal_to(*others)
    for block, direction in apart.directions.items():
        shared = np.stack([o.directions[block] for o in others], axis=1)
        wanted = own.directions[block] - shared @ np.linalg.lstsq(shared, own.directions[block])[0]
        np.testing.assert_allclose(direction, wanted, atol=1e-5)
    with pytest.raises(bs.SurgeryError, match="a direction that the others do not span"):
        own.orthogonal_to(2 * own)
    # Of vectors that depend on each other, or are zero at a block, what they span is left out.
    first = others[0]
    zero = bs.ControlVector({0: np.zeros(8), 2: np.zeros(8)})
    one = own.orthogonal_to(first)
    for several in ((first, 2 * first), (first, zero)):
        for block, direction in own.orthogonal_to(*several).directions.items():
            np.testing.assert_allclose(direction, one.directions[block], atol=1e-5)
    for other in (bs.ControlVector({0: np.ones(8)}), bs.ControlVector({0: np.ones(4)}), 3):
        with pytest.raises(bs.SurgeryError, match="expected control vectors of size 8 with a dir"):
            own.orthogonal_to(other)


@pytest.mark.slow
def test_an_empty_text_counts_as_a_random_one():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    (loss,) = Perplexity(lm, 1).losses(["Tom had a ball."], [""])
    assert loss == pytest.approx(np.log(lm.opened.token_embedding.input_dim))


@pytest.mark.slow
def test_more_than_ten_blocks_keep_their_order(rng):
    """Names of sites sort as text: block 10 before block 2."""
    backbone = make_gpt2(num_layers=12)
    for i, layer in enumerate(backbone.transformer_layers):
        layer._feedforward_output_dense.bias.assign(np.full(32, float(i)))
    size = residual_norms(bs.CachedCausalLM(backbone))
    assert [*size] == list(range(12))
    assert np.all(np.diff([*size.values()]) > 0)


@pytest.mark.slow
def test_only_what_is_new_learns_and_the_same_each_time():
    """With dropout, and with an edit of the user's own that could be trained."""
    backbone = keras_hub.models.GPT2Backbone(60, 2, 4, 32, 64, dropout=0.5, max_sequence_length=64)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.LowRank("blocks.0.query", rank=2)]))
    lm.compile(sampler="greedy")
    before = bs.weights_digest(lm.opened)
    options = {"steps": 3, "seed": 5}
    vectors = [learned_vector("learned", lm, PAIRS, SIZE, options) for _ in range(2)]
    assert vectors[0] == vectors[1]
    refts = [Interventions(lm, "tone", 2, PAIRS, options) for _ in range(2)]
    trained = [r.edit(Candidate("reft", (1,), 1.0)).interventions for r in refts]
    for a, b in zip(*(x["blocks.1"].weights for x in trained), strict=True):
        np.testing.assert_array_equal(a, b)
    assert bs.weights_digest(lm.opened) == before


def test_keras_constrains_what_optimizers_write():
    """Both limits, `max_norm` and the orthonormal rows of `Reft`, rest on this."""
    dense = keras.layers.Dense(4, use_bias=False, kernel_constraint=keras.constraints.MaxNorm(0.1))
    model = keras.Sequential([dense])
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    assert np.linalg.norm(np.asarray(dense.kernel), axis=0).max() <= 0.1 + 1e-6
