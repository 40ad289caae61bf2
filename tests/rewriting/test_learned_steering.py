"""A steering direction declared trainable: learned by gradient, then a vector like any other."""

from dataclasses import replace

import jax
import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import FAMILIES, make_deep_gpt2, make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

ZERO = np.zeros(32, "float32")


def batch(rng):
    ids = rng.integers(1, 60, (4, 10))
    return {"token_ids": ids[:, :-1], "padding_mask": np.ones((4, 9), "int32")}, ids[:, 1:]


def learner(backbone, vector, optimizer=None, **options):
    steer = bs.Steer("mood", vector, trainable=True, **options)
    lm = bs.CachedCausalLM(bs.operate(backbone, [steer]))
    lm.compile(sampler="greedy", optimizer=optimizer or keras.optimizers.SGD(1.0))
    return lm


@pytest.mark.slow
def test_one_step_is_the_gradient_of_the_loss(rng):
    """By KerasHub's own blocks and `jax.grad`."""
    backbone, strength = make_deep_gpt2(), 0.5
    before = bs.weights_digest(backbone)
    lm = learner(backbone, {1: ZERO}, strength=strength)
    x, y = batch(rng)
    lm.fit(x, y, epochs=1, batch_size=4, shuffle=False, verbose=0)
    learned = lm.opened.rewrites[0].directions
    assert [*learned] == [1]
    assert [v.path for v in lm.trainable_variables] == ["learned_mood/directions"]
    assert bs.weights_digest(backbone) == before
    after_block_1 = keras.Model(backbone.input, backbone.transformer_layers[1].output)
    states = np.asarray(after_block_1.predict_on_batch(x))

    def loss(vector):
        hidden = backbone.transformer_layers[2](states + strength * vector)
        logits = backbone.token_embedding(backbone.layer_norm(hidden), reverse=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.mean(losses)

    wanted = -jax.jit(jax.grad(loss))(ZERO)
    assert np.abs(wanted).max() > 1e-4
    assert relative(learned[1], wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("mode", ["add", "ablate"])
def test_it_computes_what_a_given_vector_does(name, mode, rng):
    """Whole, in chunks, and in generation, strengths of each row included."""
    backbone = FAMILIES[name](num_layers=3)
    vector = {block: rng.normal(0, 1, 32).astype("float32") for block in (0, 1)}
    given, learned = (
        bs.operate(backbone, [bs.Steer("mood", vector, mode=mode, trainable=trainable)])
        for trainable in (False, True)
    )
    inputs = tokens(rng)
    plain, wanted = run(bs.open_backbone(backbone), inputs), run(given, inputs)
    assert relative(plain, wanted) > 1e-3
    assert np.array_equal(run(learned, inputs), wanted)
    assert relative(run_chunks(bs.rewire(learned), inputs, [4, 1, 4])[0], wanted) <= 5e-6
    prompts, options = ragged(rng, (4, 2), 4), {"max_new_tokens": 8, "stop_token_ids": None}
    texts = []
    for edited in (given, learned):
        lm = bs.CachedCausalLM(edited)
        lm.compile(sampler="greedy")
        texts.append(lm.generate(prompts, controls={"mood": [3.0, -2.0]}, **options)["token_ids"])
    assert np.array_equal(*texts)


@pytest.mark.slow
def test_what_was_learned_goes_on(rng, tmp_path):
    """Generation sees it at once; another graph, a plain vector and a recipe give the same."""
    backbone = make_deep_gpt2()
    adam = keras.optimizers.Adam(0.3)
    lm = learner(backbone, {1: ZERO, 2: ZERO}, adam, renormalize=True)
    options = {"max_new_tokens": 8, "stop_token_ids": None}
    prompts = ragged(rng, (4, 2), 4)
    text = lm.generate(prompts, **options)["token_ids"]
    x, y = batch(rng)
    losses = lm.fit(x, y, epochs=20, batch_size=4, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert not np.array_equal(lm.generate(prompts, **options)["token_ids"], text)
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    inputs = tokens(rng)
    wanted = run(lm.opened, inputs)
    rewrite = lm.opened.rewrites[0]
    again = bs.operate(backbone, [rewrite])
    assert again.rewrites[0].learned is rewrite.learned
    vector = bs.ControlVector(rewrite.directions)
    plain = bs.operate(backbone, [bs.Steer("mood", vector, renormalize=True)])
    bs.save_recipe(lm, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", make_deep_gpt2())
    for edited in (again, plain, loaded):
        assert np.array_equal(run(edited, inputs), wanted)
    assert loaded.rewrites[0].learned is not rewrite.learned
    np.testing.assert_array_equal(loaded.rewrites[0].directions[2], rewrite.directions[2])


@pytest.mark.slow
def test_what_was_learned_on_all_tokens_steers_generated_ones(rng, tmp_path):
    """As the error of `tokens="generated"` advises: by a `Control`, or by the rewrite itself."""
    backbone = make_deep_gpt2()
    lm = learner(backbone, {1: ZERO}, keras.optimizers.Adam(0.3))
    x, y = batch(rng)
    lm.fit(x, y, epochs=5, batch_size=4, shuffle=False, verbose=0)
    rewrite = lm.opened.rewrites[0]
    generated = bs.Steer("mood", rewrite.directions, tokens="generated")
    learned = bs.operate(backbone, [replace(rewrite, tokens="generated")])
    bs.save_recipe(learned, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", backbone)
    prompts, options = ragged(rng, (4, 2), 4), {"max_new_tokens": 8, "stop_token_ids": None}
    control = bs.Control(3.0, tokens="generated")
    got = lm.generate(prompts, controls={"mood": control}, **options)["token_ids"]
    assert (got != lm.generate(prompts, controls={"mood": 3.0}, **options)["token_ids"]).any()
    for edited in (bs.operate(backbone, [generated]), learned, loaded):
        other = bs.CachedCausalLM(edited)
        other.compile(sampler="greedy")
        assert np.array_equal(
            other.generate(prompts, controls={"mood": 3.0}, **options)["token_ids"], got
        )
    for model in (learned, bs.CachedCausalLM(learned)):
        with pytest.raises(bs.SurgeryError, match="expected tokens that `fit` knows"):
            model.fit(*batch(rng))
    learned.rewrites[0].learned.trainable = False
    learned.rewrites[0].check_fit()


@pytest.mark.slow
def test_merge_folds_what_was_learned(rng):
    backbone = make_deep_gpt2()
    edited = bs.operate(backbone, [bs.Steer("mood", {1: ZERO}, trainable=True)])
    edited.trainable_variables[0].assign(rng.normal(0, 1, (1, 32)))
    inputs = tokens(rng)
    wanted = run(edited, inputs)
    assert relative(run(backbone, inputs), wanted) > 1e-3
    assert relative(run(bs.merge(edited), inputs), wanted) <= 1e-5


def test_a_start_that_is_too_long_is_cut():
    start = {1: ZERO + 1, 2: ZERO + 0.01}
    edited = bs.operate(make_deep_gpt2(), [bs.Steer("mood", start, trainable=True, max_norm=0.5)])
    lengths = [np.linalg.norm(x) for x in edited.rewrites[0].directions.values()]
    assert lengths == pytest.approx([0.5, 0.01 * 32**0.5], rel=1e-4)


@pytest.mark.slow
def test_directions_stay_float32_in_bfloat16(rng):
    backbone = make_gpt2(dtype="bfloat16")
    edited = bs.operate(backbone, [bs.Steer("mood", {1: ZERO + 0.001}, trainable=True)])
    assert edited.trainable_variables[0].dtype == "float32"
    plain = bs.operate(backbone, [bs.Steer("mood", {1: ZERO + 0.001})])
    inputs = tokens(rng)
    assert np.array_equal(run(edited, inputs), run(plain, inputs))


def test_errors(rng):
    message = "expected a start that has a gradient: .* Received strength 0"
    with pytest.raises(bs.SurgeryError, match=message):
        bs.Steer("mood", {1: ZERO}, strength=0, trainable=True)
    with pytest.raises(bs.SurgeryError, match=r"Received 'generated': .* Train with tokens='all'"):
        bs.Steer("mood", {1: ZERO}, tokens="generated", trainable=True)
    with pytest.raises(bs.SurgeryError, match=r"Received zeros at blocks \[1\]"):
        bs.Steer("mood", {0: ZERO + 1, 1: ZERO}, mode="ablate", trainable=True)
    lm = learner(make_deep_gpt2(), {1: ZERO})
    control = bs.Control(directions={1: ZERO + 1})
    options = {"max_new_tokens": 2, "stop_token_ids": None, "controls": {"mood": control}}
    with pytest.raises(bs.SurgeryError, match="expected no directions for a Steer that learns"):
        lm.generate(ragged(rng, (4,), 4), **options)
    learned = lm.opened.rewrites[0].learned
    with pytest.raises(bs.SurgeryError, match=r"of blocks \[2\]. Received one of blocks \[1\]"):
        bs.Steer("mood", {2: ZERO}, trainable=True, learned=learned)
    with pytest.raises(bs.SurgeryError, match="expected `learned` of a trainable Steer"):
        bs.Steer("mood", {1: ZERO}, learned=learned)
