"""Directions taken out of all that is written, against weights that cannot write them."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.families import ROWS
from tests.helpers import make_gpt2, ragged
from tests.reference import run, tokens

SPAN = np.random.default_rng(5).normal(size=(3, 32))
"""Three directions at any angle."""


def complement(directions):
    """The projection onto what is at right angles to some directions, by plain least squares."""
    rows = np.atleast_2d(directions).astype("float64")
    return (np.eye(rows.shape[1]) - np.linalg.pinv(rows) @ rows).astype("float32")


def untied_llama():
    return ROWS["llama"].make(tie_word_embeddings=False)


def orthogonalized(backbone, directions):
    """A second backbone whose own weights, set by hand, cannot write the directions."""
    other = untied_llama()
    other.set_weights(backbone.get_weights())
    keep = complement(directions)
    table = other.token_embedding.embeddings
    table.assign(np.array(table) @ keep)
    for block in other.transformer_layers:
        for dense in (
            block._self_attention_layer._output_dense,
            block._feedforward_output_dense,
        ):
            dense.kernel.assign(np.array(dense.kernel) @ keep)
    return other


def test_it_is_what_orthogonalized_weights_do(rng):
    backbone = untied_llama()
    edited = bs.operate(backbone, [bs.ProjectOut("none", SPAN)])
    inputs = tokens(rng)
    other = orthogonalized(backbone, SPAN)
    wanted = run(other, inputs)
    largest = np.abs(wanted).max()
    assert np.abs(run(edited, inputs) - wanted).max() <= 1e-5 * largest
    assert np.abs(run(edited, inputs) - run(backbone, inputs)).max() > 1e-2 * largest
    merged = bs.merge(edited)
    for a, b in zip(merged.weights, other.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, err_msg=a.path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_nothing_reads_the_directions(name, rng):
    """In each family: what stands at every site of the stream is at right angles to all."""
    backbone = ROWS[name].make()
    beside = [path for path in bs.sites(backbone) if path.endswith("other_streams")]
    capture = bs.Capture("embeddings", "blocks.*", *beside)
    edited = bs.operate(backbone, [bs.ProjectOut("none", SPAN), capture])
    captured = edited.predict_on_batch(tokens(rng))["captures"]
    for path, states in captured.items():
        along = np.abs(np.asarray(states, "float64") @ SPAN.T).max()
        assert along <= 1e-5 * np.abs(states).max() * 32, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_experts_are_merged(name, rng):
    backbone = ROWS[name].make()
    edited = bs.operate(backbone, [bs.ProjectOut("none", SPAN, strength=0.7)])
    merged = bs.merge(edited)
    inputs = tokens(rng)
    wanted = run(edited, inputs)
    largest = np.abs(wanted).max()
    assert np.abs(run(merged, inputs) - wanted).max() <= 1e-5 * largest
    assert np.abs(run(backbone, inputs) - wanted).max() > 1e-3 * largest


@pytest.mark.slow
def test_strengths_and_tokens_of_each_row(rng):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.ProjectOut("none", SPAN[0])]))
    plain = bs.CachedCausalLM(bs.open_backbone(backbone))
    for model in (lm, plain):
        model.compile(sampler="greedy")
    prompts = ragged(rng, (4, 7, 5), 7)
    options = {"max_new_tokens": 10, "stop_token_ids": None}
    control = bs.Control([1.0, 0.0, 1.0], tokens=["all", "all", (-1, None)])
    got = lm.generate(prompts, controls={"none": control}, **options)["token_ids"]
    np.testing.assert_array_equal(got[1], plain.generate(prompts, **options)["token_ids"][1])
    for row, (strength, which) in enumerate([(1.0, "all"), (0.0, "all"), (1.0, (-1, None))]):
        one = {name: x[row : row + 1] for name, x in prompts.items()}
        alone = lm.generate(one, controls={"none": bs.Control(strength, tokens=which)}, **options)[
            "token_ids"
        ][0]
        np.testing.assert_array_equal(got[row, : len(alone)], alone)
    bs.check(lm.opened)


@pytest.mark.slow
def test_each_row_has_directions_of_its_own(rng):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.ProjectOut("none", SPAN)]))
    lm.compile(sampler="greedy")
    prompts, new = ragged(rng, (4, 7, 5), 7), rng.normal(size=32)
    options = {"max_new_tokens": 10, "stop_token_ids": None}
    directions = [new, np.stack([SPAN[1], new]), SPAN]  # the first two span less
    control = bs.Control(directions=directions, strength=[1.0, 1.0, 0.6])
    inputs = tokens(rng, rows=3)
    bound = bind_controls(lm.opened, {"none": control}, np.array([9, 9, 9]))
    states = run(lm.opened, {**inputs, **bound})
    got = lm.generate(prompts, controls={"none": control}, **options)["token_ids"]
    for row, strength in enumerate(control.strength):
        rewrite = bs.ProjectOut("none", directions[row], strength=strength)
        alone = bs.CachedCausalLM(bs.operate(backbone, [rewrite]))
        alone.compile(sampler="greedy")
        one = {name: x[row : row + 1] for name, x in prompts.items()}
        wanted = alone.generate(one, **options)["token_ids"][0]
        np.testing.assert_array_equal(got[row, : len(wanted)], wanted)
        wanted = run(alone.opened, {name: x[row : row + 1] for name, x in inputs.items()})[0]
        assert np.abs(states[row] - wanted).max() <= 1e-5 * np.abs(wanted).max()
    for same in (SPAN[:2], np.stack([SPAN[:2]] * 3), [SPAN[:2].tolist()] * 3):
        again = bind_controls(lm.opened, {"none": bs.Control(directions=same)}, np.array([9, 9, 9]))
        basis = again["none_basis"].astype("float64")
        off = basis[2].T @ basis[2] - (np.eye(32) - complement(SPAN[:2]))
        assert np.abs(off).max() <= 1e-6
        np.testing.assert_array_equal(basis[0], basis[2])


@pytest.mark.slow
def test_any_basis_of_one_span_does_the_same(rng):
    backbone, inputs = make_gpt2(), tokens(rng)
    mixed = np.array([[1.0, 2, 0], [0, 1, -1], [3, 0, 1], [1, 1, 1]]) @ SPAN  # one too many
    once = run(bs.operate(backbone, [bs.ProjectOut("a", SPAN, at="blocks.*")]), inputs)
    again = run(bs.operate(backbone, [bs.ProjectOut("a", mixed, at=("blocks.*",))]), inputs)
    assert np.abs(once - again).max() <= 1e-4 * np.abs(once).max()
    unit = {i: SPAN[0] for i in range(backbone.num_layers)}
    steered = bs.operate(backbone, [bs.Steer("a", unit, mode="ablate")])
    single = bs.operate(backbone, [bs.ProjectOut("a", SPAN[0], at="blocks.*")])
    assert np.abs(run(steered, inputs) - run(single, inputs)).max() <= 1e-5 * np.abs(once).max()


def test_strength_0_is_no_edit(rng):
    backbone, inputs = make_gpt2(), tokens(rng)
    edited = bs.operate(backbone, [bs.ProjectOut("none", SPAN, strength=0.0)])
    np.testing.assert_array_equal(run(edited, inputs), run(bs.open_backbone(backbone), inputs))


def test_merging_names_what_it_cannot_hold():
    edited = bs.operate(make_gpt2(), [bs.ProjectOut("none", SPAN)])
    with pytest.raises(
        bs.SurgeryError, match=r"'token_embedding' make the logits too: name other sites by `at`"
    ):
        bs.merge(edited)
    edited = bs.operate(make_gpt2(num_layers=4), [bs.ProjectOut("none", SPAN, at="blocks.*")])
    with pytest.raises(bs.SurgeryError, match=r"\(at blocks.0, blocks.1 and 2 more\)"):
        bs.merge(edited)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bs.ProjectOut("a", np.zeros(32)), "none of them zero. Received"),
        (lambda: bs.ProjectOut("a", [[1.0] * 32, [0.0] * 32]), "none of them zero"),
        (lambda: bs.ProjectOut("a", 3.0), r"float\[hidden_dim\] or float\[directions, hidden_dim"),
        (lambda: bs.ProjectOut("a", [np.nan] * 32), "to be finite"),
        (lambda: bs.ProjectOut("a", {1: np.ones(32)}), "Pass `vector.directions"),
        (lambda: bs.ProjectOut("a", np.ones(32), at=()), "`at` to be names"),
        (lambda: bs.ProjectOut("a", np.ones(8)), r"'embeddings'.* \[32\]. Received.* of size 8"),
        (lambda: bs.ProjectOut("a", np.ones(8), at="blocks.*.query"), "Select sites of that size"),
        (lambda: bs.ProjectOut("a", np.ones(32), at="blocks.7"), "matches nothing"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(make_gpt2(), [make()])


def test_a_control_of_something_else_is_refused():
    edited = bs.operate(make_gpt2(), [bs.ProjectOut("a", SPAN)])
    for directions, words in {
        "of blocks": ({1: SPAN[0]}, r"as a list of 2, one for each row, each finite fl"),
        "of another size": (np.ones(8), r"float\[32\] or float\[directions, 32\], none"),
        "of three rows": ([SPAN[0]] * 3, "as a list of 2, one for each row"),
        "in a wider span": (np.eye(32)[:4], r"span at most 3 dimensions.* some that span 4\. Bu"),
        "of none in a row": (
            [SPAN[0], SPAN[0] * 0],
            r"finite float\[hidden_dim\], which is not zero",
        ),
    }.values():
        with pytest.raises(bs.SurgeryError, match=words):
            bind_controls(edited, {"a": bs.Control(directions=directions)}, np.array([3, 3]))
    with pytest.raises(
        bs.SurgeryError, match=r"a list of one of these for each row.* Received \[\]"
    ):
        bs.Control(directions=[])
    edited = bs.operate(make_gpt2(), [bs.Steer("a", {1: SPAN[0]})])
    with pytest.raises(bs.SurgeryError, match="directions as a control vector, a list of one for"):
        bind_controls(edited, {"a": bs.Control(directions=SPAN[0])}, np.array([3]))


def test_a_recipe_keeps_it(rng, tmp_path):
    backbone, inputs = make_gpt2(), tokens(rng)
    edited = bs.operate(backbone, [bs.ProjectOut("none", SPAN, strength=0.5)])
    bs.save_recipe(edited, tmp_path / "none.recipe")
    keras.utils.clear_session(free_memory=False)
    again = bs.load_recipe(tmp_path / "none.recipe", backbone)
    np.testing.assert_array_equal(run(again, inputs), run(edited, inputs))
