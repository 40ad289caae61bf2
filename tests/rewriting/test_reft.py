"""An intervention that is learned: none at first, orthonormal all along, and what `fit` trains."""

from dataclasses import replace

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.helpers import make_deep_gpt2, make_gpt2, ragged
from tests.reference import run, tokens


def batch(rng):
    ids = rng.integers(1, 60, (8, 10))
    return {"token_ids": ids[:, :-1], "padding_mask": np.ones((8, 9), "int32")}, ids[:, 1:]


@pytest.mark.slow
def test_it_begins_as_none(rng):
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.Reft("tone", rank=3, at="blocks.*")])
    inputs = tokens(rng)
    wanted = run(bs.open_backbone(backbone), inputs)
    np.testing.assert_array_equal(run(edited, inputs), wanted)
    for variable in edited.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    assert np.abs(run(edited, inputs) - wanted).max() > 0.1
    off = {**inputs, "tone_strength": np.zeros(len(inputs["token_ids"]), "float32")}
    np.testing.assert_array_equal(run(edited, off), wanted)


def test_fit_trains_it_alone_and_keeps_rows_orthonormal(rng):
    backbone = make_deep_gpt2()
    before = bs.weights_digest(backbone)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Reft("tone", rank=4, at="blocks.1")]))
    lm.compile(optimizer=keras.optimizers.Adam(0.05))
    x, y = batch(rng)
    losses = lm.fit(x, y, epochs=12, batch_size=8, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert bs.weights_digest(backbone) == before
    (layer,) = lm.opened.rewrites[0].interventions.values()
    along = np.asarray(layer.along)
    np.testing.assert_allclose(along @ along.T, np.eye(4), atol=1e-5)
    assert np.abs(np.asarray(layer.towards) - along).max() > 0.01


@pytest.mark.slow
def test_strengths_and_tokens_of_each_row(rng):
    """Trained on all tokens, say, and then used on generated ones alone."""
    edited = bs.operate(make_gpt2(), [bs.Reft("tone", 3, "blocks.1")])
    for variable in edited.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    prompts = ragged(rng, (4, 7), 7)
    options = {"max_new_tokens": 12, "stop_token_ids": None}

    def generate(lm, control, prompts=prompts):
        return lm.generate(prompts, controls={"tone": control}, **options)["token_ids"]

    both = generate(lm, bs.Control([2.0, 0.0], tokens="generated"))
    for row, strength in enumerate((2.0, 0.0)):
        one = {name: x[row : row + 1] for name, x in prompts.items()}
        alone = generate(lm, bs.Control(strength, tokens="generated"), one)[0]
        np.testing.assert_array_equal(both[row, : len(alone)], alone)
    trained = replace(edited.rewrites[0], tokens="generated")
    other = bs.CachedCausalLM(bs.operate(lm.opened.owner, [trained]))
    other.compile(sampler="greedy")
    np.testing.assert_array_equal(generate(other, [2.0, 0.0]), both)
    mixed = generate(lm, bs.Control(2.0, tokens=["all", "generated"]))
    np.testing.assert_array_equal(mixed[0], generate(lm, 2.0)[0])
    np.testing.assert_array_equal(mixed[1], generate(other, 2.0)[1])
    assert (mixed[0] != both[0]).any()
    assert lm.programs.compilations == {"prefill": 2, "decode": 2}
    plain = bs.CachedCausalLM(lm.opened.owner)
    plain.compile(sampler="greedy")
    unedited = plain.generate(prompts, **options)["token_ids"]
    np.testing.assert_array_equal(both[1], unedited[1])
    # The first new token is chosen over the prompt, which is not edited.
    assert both[0, 4] == unedited[0, 4]
    assert (both[0] != unedited[0]).any()


@pytest.mark.slow
def test_another_graph_gets_what_was_learned(rng, tmp_path):
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.Reft("tone", rank=3, at="blocks.*")])
    for variable in edited.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    inputs = tokens(rng)
    wanted = run(edited, inputs)
    again = bs.operate(backbone, [bs.Capture("blocks.0"), edited.rewrites[0]])
    np.testing.assert_array_equal(run(again, inputs), wanted)
    bs.save_recipe(edited, tmp_path / "tone.recipe")
    loaded = bs.load_recipe(tmp_path / "tone.recipe", backbone)
    np.testing.assert_array_equal(run(loaded, inputs), wanted)


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: bs.Reft("tone", 2, "blocks.0", tokens="generated"),
            "Reft at 'tone': .* Received 'generated': .* Train with tokens='all', and pass",
        ),
        (lambda: bs.Reft("tone", 0, "blocks.0"), "`rank` to be an integer of 1 or more"),
        (lambda: bs.Reft("a b", 2, "blocks.0"), "a name of letters, digits and underscores"),
        (lambda: bs.Reft("tone", 32, "blocks.0"), r"more than 32 numbers.*'blocks.0' with \[32\]"),
        (lambda: bs.Reft("tone", 2, "blocks.0.query"), r"'blocks.0.query' with \[4, 8\]"),
        (
            lambda: bs.Reft("tone", 2, "blocks.0", interventions={"blocks.0": 1}),
            "`interventions` to be {site path: layer}",
        ),
        (
            lambda: bs.Reft(
                "tone",
                3,
                "blocks.0",
                interventions=bs.operate(make_gpt2(), [bs.Reft("tone", 2, "blocks.0")])
                .rewrites[0]
                .interventions,
            ),
            r"of shape \(3, 32\) for 'blocks.0'. Received one of \(2, 32\)",
        ),
        (
            lambda: bs.Reft(
                "tone",
                2,
                "blocks.1",
                interventions=bs.operate(make_gpt2(), [bs.Reft("tone", 2, "blocks.0")])
                .rewrites[0]
                .interventions,
            ),
            r"exactly the selected sites \['blocks.1'\]. Received some for \['blocks.0'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(bs.SurgeryError, match=message):
        bs.operate(make_gpt2(), [make()])


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (
            bs.Control(directions={1: np.ones(32)}),
            "of strength and tokens, .* of a Reft. Received directions. L",
        ),
        (bs.Control(bs.Schedule([1.0, 0.0])), "'tone': expected finite numbers"),
        (bs.Control(tokens=["all"] * 3), "'tone': expected tokens for 2 rows"),
    ],
)
def test_controls_that_do_not_fit_are_refused(control, message):
    edited = bs.operate(make_gpt2(), [bs.Reft("tone", 2, "blocks.1")])
    with pytest.raises(bs.SurgeryError, match=message):
        bind_controls(edited, {"tone": control}, np.array([3, 4]))
