"""Methods that learn or choose a direction, next to their definitions in plain NumPy."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.tuning import reft_r1
from backbone_surgery.tuning.candidates import Adapters, Candidate
from backbone_surgery.tuning.features import best_feature, encode, feature_vector, read_autoencoders
from backbone_surgery.tuning.learned import learned_vector
from backbone_surgery.tuning.learning import Pairs, losses_of, mean_over_rows
from backbone_surgery.tuning.preferences import BETA, preference_losses
from backbone_surgery.tuning.reft_r1 import RankOne, reft_r1_vector
from tests.edits import save_autoencoder
from tests.helpers import make_gpt2
from tests.tuning.test_learning import PAIRS, SIZE, mean_loss

OPTIONS = {"steps": 60, "seed": 0}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# BiPO.


def test_the_loss_of_a_preference_is_that_of_the_paper(rng):
    """-log sigmoid(d β log ratio of the first - d β log ratio of the second)."""
    signs = [1, -1, -1]
    steered, unedited = rng.uniform(0, 3, (2, 6, 5)).astype("float32")
    counted = (rng.uniform(size=(6, 5)) < 0.7).astype("float32")
    ratios = ((unedited - steered) * counted).sum(axis=1)  # log p - log p of the unedited
    wanted = [
        -np.log(sigmoid(d * BETA * (first - second)))
        for d, first, second in zip(signs, ratios[::2], ratios[1::2], strict=True)
    ]
    weights = BETA * np.repeat(signs, 2)[:, None] * np.tile([1, -1], 3)[:, None] * counted
    target = np.concatenate([weights, (weights * unedited).sum(axis=1, keepdims=True)], axis=1)
    got = preference_losses(target.astype("float32"), steered)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.slow
def test_a_preference_is_learned_at_both_signs():
    """Each block by itself: the text that is preferred at a sign gains on the other."""
    lm = bs.CachedCausalLM(make_gpt2())
    vector = learned_vector("bipo", lm, PAIRS, SIZE, OPTIONS)
    for block, size in SIZE.items():
        direction = vector.directions[block]
        assert np.linalg.norm(direction) <= 0.5 + 1e-5
        steer = bs.Steer("mood", {block: size * direction})
        edited = bs.CachedCausalLM(bs.operate(lm.backbone, [steer]))
        for first, second in PAIRS:
            margins = [
                len(first[2:]) * mean_loss(edited, [first], 2, mood_strength=[s])
                - len(second[2:]) * mean_loss(edited, [second], 2, mood_strength=[s])
                for s in (1.0, 0.0, -1.0)
            ]
            assert margins[0] < margins[1] - 0.2 < margins[2] - 0.4


# ReFT-r1.


def rank_one(h, w, real, sign, k):
    """Return what ReFT-r1 makes of the hidden states of a text, and its cost, in float64."""
    shown = np.maximum(sign * (h @ w), 0) * real
    largest = np.sort(shown)[::-1][:k]
    return h + sign * largest.mean() * w, (shown.sum() - largest.sum()) / real.sum()


def test_a_rank_one_layer_detects_and_steers(rng):
    layer = RankOne(seed=0)
    x = rng.normal(size=(3, 40, 8)).astype("float32")
    mask = np.array([[1] * 40, [1] * 33 + [0] * 7, [1] * 40])
    positions = np.tile(np.arange(40), (3, 1))
    strength, sparsity = np.float32([1, -1, 0]), np.float32([0.5, 0.25, 0.5])
    got = np.asarray(layer(x, positions, mask, strength, sparsity))
    w = np.asarray(layer.direction, "float64")
    w /= np.linalg.norm(w)
    cost = 0.0
    for row, sign in enumerate((1, -1)):
        real = mask[row] * (positions[row] > 0)
        wanted, others = rank_one(x[row].astype("float64"), w, real, sign, reft_r1.LARGEST)
        np.testing.assert_allclose(got[row], wanted, atol=1e-5)
        assert others > 0.05
        cost += sparsity[row] * others / 3
    assert np.array_equal(got[2], x[2])
    assert float(layer.losses[0]) == pytest.approx(cost, rel=1e-5)


@pytest.mark.slow
def test_reft_r1_is_trained_on_likelihood_and_sparsity(rng):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(backbone)
    edited = bs.operate(backbone, [reft_r1._RankOne("blocks.1", "r1", 0)])
    model = losses_of(edited, ["r1_strength", "r1_sparsity"], edited.trained_layers)
    model.compile(loss=mean_over_rows)
    pairs = [tuple(rng.integers(1, 60, n).tolist() for n in (40, 37)) for _ in range(2)]
    texts = Pairs.read(lm, pairs)
    strength = np.float32([1, -1, 1, -1])
    x = {**texts.inputs, "r1_strength": strength}
    losses = [
        model.evaluate({**x, "r1_sparsity": np.full(4, s, "float32")}, texts.counted, verbose=0)
        for s in (0.0, 3.0)
    ]
    capturing = bs.operate(backbone, [bs.Capture("blocks.1")])
    w = np.asarray(edited.trained_layers[0].direction, "float64")
    w /= np.linalg.norm(w)
    costs = []
    for row in range(4):
        text = np.array([pairs[row // 2][row % 2]])
        outputs = capturing({"token_ids": text, "padding_mask": np.ones_like(text)})
        h = np.asarray(outputs["captures"]["blocks.1"])
        real = np.arange(text.shape[1]) > 0
        costs.append(rank_one(h[0].astype("float64"), w, real, strength[row], reft_r1.LARGEST)[1])
    assert min(costs) > 0.01
    assert losses[1] - losses[0] == pytest.approx(3 * np.mean(costs), rel=1e-4)


@pytest.mark.slow
def test_a_rank_one_direction_makes_its_side_likelier():
    backbone = make_gpt2()
    positions = backbone.get_layer("position_embedding").position_embeddings
    positions.assign(30 * positions)  # else hidden states are so short that nothing is detected
    lm = bs.CachedCausalLM(backbone)
    before = bs.weights_digest(lm.backbone)
    options = {"steps": 300, "seed": 0}
    vector = reft_r1_vector(lm, PAIRS, SIZE, options)
    assert reft_r1_vector(lm, PAIRS, SIZE, options) == vector
    assert bs.weights_digest(lm.backbone) == before
    for block, size in SIZE.items():
        direction = vector.directions[block]
        assert np.linalg.norm(direction) == pytest.approx(1, rel=1e-5)
        steer = bs.Steer("mood", {block: size * direction})
        edited = bs.CachedCausalLM(bs.operate(lm.backbone, [steer]))
        for sign, i in ((1.0, 0), (-1.0, 1)):
            side = [pair[i] for pair in PAIRS]
            loss = mean_loss(edited, side, 2, mood_strength=[sign])
            assert loss < mean_loss(edited, side, 2, mood_strength=[-sign]) - 0.01


# A feature of a sparse autoencoder.


def test_the_best_feature_has_the_auroc_furthest_from_chance(rng):
    metrics = pytest.importorskip("sklearn.metrics")
    first, second = np.maximum(rng.normal(size=(2, 30, 12)), 0).round(1)
    second[:, 7] += 1.5
    sides = np.concatenate([first, second]), np.repeat([1, 0], 30)
    areas = [metrics.roc_auc_score(sides[1], x) for x in sides[0].T]
    assert int(np.argmax(np.abs(np.array(areas) - 0.5))) == 7
    assert best_feature(first, second) == (7, -1)
    assert best_feature(second, first) == (7, 1)
    # Two that tell all texts apart: the one whose means are further apart.
    first[:, 3], second[:, 3], second[:, 7] = 9.0, 0.0, first[:, 7].max() + 1
    assert best_feature(first, second) == (3, 1)


@pytest.mark.slow
def test_features_are_those_that_are_spliced_in(rng, tmp_path):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(backbone)
    weights = save_autoencoder(tmp_path / "sae", rng, 32)
    paths = {1: str(tmp_path / "sae")}
    autoencoders = read_autoencoders(paths, [0, 1], 32)
    vector = feature_vector(lm, PAIRS, autoencoders)
    spliced = bs.SparseAutoencoder("blocks.1", paths[1], amount=0.0, name="splice")
    edited = bs.operate(backbone, [spliced, bs.Capture("blocks.1.sae_latents")])
    features = []
    for text in (text for pair in PAIRS for text in pair):
        ids = np.array([text])
        outputs = edited({"token_ids": ids, "padding_mask": np.ones_like(ids)})
        features.append(np.asarray(outputs["captures"]["blocks.1.sae_latents"])[0, -1])
    features = np.array(features)
    best, sign = best_feature(features[::2], features[1::2])
    assert vector.info["feature_1"] == str(best)
    np.testing.assert_array_equal(vector.directions[1], sign * weights["W_dec"][best])
    assert (np.count_nonzero(features, axis=1) == 6).all()
    states = rng.normal(size=(5, 32)).astype("float32")
    assert (np.count_nonzero(encode(states, autoencoders[1]), axis=1) <= 6).all()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (None, "expected folders by block, of blocks 0 to 1"),
        ({}, "expected folders by block, of blocks 0 to 1"),
        ({2: "x"}, "expected folders by block, of blocks 0 to 1"),
        ({1: "nowhere"}, "expected a folder with one of sae.safetensors"),
    ],
)
def test_autoencoders_that_do_not_fit_are_refused(paths, message, rng, tmp_path):
    with pytest.raises(bs.SurgeryError, match=message):
        read_autoencoders(paths, [0, 1], 32)
    save_autoencoder(tmp_path / "sae", rng, 16)
    with pytest.raises(bs.SurgeryError, match="of size 32 at block 1"):
        read_autoencoders({1: str(tmp_path / "sae")}, [0, 1], 32)


# LoRA.


@pytest.mark.slow
def test_adapters_learn_both_sides_of_pairs():
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    found = [Adapters(lm, "tone", 2, PAIRS, OPTIONS) for _ in range(2)]
    edits = [x.edit(Candidate("lora", (0, 1), 1.4)) for x in found]
    for path, adapter in edits[0].adapters.items():
        for a, b in zip(adapter.weights, edits[1].adapters[path].weights, strict=True):
            np.testing.assert_array_equal(a, b)
    edited = bs.CachedCausalLM(bs.operate(lm.backbone, edits[:1]))
    for sign, i in ((1.4, 0), (-1.4, 1)):
        side = [pair[i] for pair in PAIRS]
        loss = mean_loss(edited, side, 2, tone_strength=sign)
        assert loss < mean_loss(lm, side, 2) - 0.2
        assert loss < mean_loss(edited, side, 2, tone_strength=-sign) - 0.4


@pytest.mark.slow
def test_low_rank_by_a_strength_for_each_row(rng):
    """Rows at 1, at 0 and at -2 equal a fixed map, no map, and the map times -2."""
    backbone = make_gpt2()
    fixed = bs.operate(backbone, [bs.LowRank("blocks.*.value", rank=3)])
    for variable in fixed.trainable_variables:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    own = fixed.rewrites[0].adapters
    steered = bs.operate(
        backbone, [bs.LowRank("blocks.*.value", rank=3, name="tone", adapters=own, strength=1.0)]
    )
    lm = bs.CachedCausalLM(steered)
    ids = np.repeat(rng.integers(1, 60, (1, 9)), 3, axis=0).astype("int32")
    got = np.asarray(lm.score(ids, controls={"tone_strength": np.float32([1.0, 0.0, -2.0])}))
    wanted = [np.asarray(bs.CachedCausalLM(x).score(ids[:1]))[0] for x in (fixed, backbone)]
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)
    np.testing.assert_array_equal(
        got[1], np.asarray(lm.score(ids, controls={"tone_strength": np.zeros(3, "float32")}))[1]
    )
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-6)
    for adapter in own.values():
        adapter.up.assign(-2 * adapter.up)
    np.testing.assert_allclose(
        got[2], np.asarray(bs.CachedCausalLM(fixed).score(ids[:1]))[0], atol=1e-5
    )
    lm.compile(sampler="greedy")
    prompt = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    texts = [
        lm.generate(prompt, controls={"tone": value}, max_new_tokens=6, stop_token_ids=None)
        for value in (1.0, [1.0, 0.0, 1.0])
    ]
    rows = [np.asarray(text["token_ids"]) for text in texts]
    np.testing.assert_array_equal(rows[0][0], rows[1][0])


def test_a_strength_is_refused_where_there_is_none():
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.LowRank("blocks.0.query", rank=2)]))
    lm.compile(sampler="greedy")
    ids = np.ones((1, 3), "int32")
    with pytest.raises(bs.SurgeryError, match="low_rank"):
        lm.generate(
            {"token_ids": ids, "padding_mask": ids}, controls={"low_rank": 1.0}, stop_token_ids=None
        )


def test_keras_adds_the_losses_of_layers_when_it_trains():
    """What `RankOne` costs rests on this."""

    class Cost(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(1,), initializer="ones", name="w")

        def call(self, x):
            self.add_loss(keras.ops.sum(self.w))
            return x

    x = keras.Input((1,))
    model = keras.Model(x, Cost()(x))
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert float(np.asarray(model.trainable_variables[0])[0]) == pytest.approx(0.5)
