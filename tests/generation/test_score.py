"""`score`, against KerasHub's own task: logits, losses, what is intercepted, and edited graphs."""

from dataclasses import replace

import jax
import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.score import interceptable
from tests.helpers import make_gpt2, ragged, relative


@pytest.fixture
def ids(rng):
    return ragged(rng, (5, 8, 6), 8)


def scored(task, ids, **kwargs):
    return np.asarray(task.score(ids["token_ids"], ids["padding_mask"], **kwargs))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("mode", ["logits", "loss"])
def test_equals_keras_hub(family, backbone, upstream, ids, mode):
    """Several rows with padding, with the loss and with what a function sees and puts in."""
    # KerasHub's Gemma goes on from the embeddings themselves, whatever the function made of them.
    first = -1 if family == "gpt2" else 0
    lm = bs.CachedCausalLM(backbone)
    targets = np.roll(ids["token_ids"], -1, axis=1)

    def run(task):
        seen = {}

        def intercept(x, index):
            seen[index] = np.asarray(x)
            return x * 1.5 + 0.1 * index if index >= first else x

        arguments = {"scoring_mode": mode, "target_ids": targets if mode == "loss" else None}
        plain = scored(task, ids, **arguments)
        return plain, scored(task, ids, layer_intercept_fn=intercept, **arguments), seen

    plain, changed, seen = run(lm)
    expected_plain, expected_changed, expected = run(upstream)
    mask = ids["padding_mask"]
    assert list(seen) == list(expected) == [-1, *range(backbone.num_layers)]
    assert relative(plain, expected_plain, mask) < 2e-6
    assert relative(changed, expected_changed, mask) < 2e-6
    assert relative(plain, changed, mask) > 1e-2
    for index, x in expected.items():
        assert relative(seen[index], x, mask) < 2e-6


def test_without_a_mask_nothing_is_padding(backbone, upstream, ids):
    lm = bs.CachedCausalLM(backbone)
    assert relative(lm.score(ids["token_ids"]), upstream.score(ids["token_ids"])) < 2e-6


@pytest.mark.slow
def test_an_edit_is_scored(backbone, ids, rng):
    """A steered graph equals the plain one with the vector added by the function."""
    vector = rng.normal(size=backbone.hidden_dim).astype("float32")
    steered = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {1: vector})]))
    strengths = np.array([[0.0], [1.0], [-2.0]], "float32")
    control = next(iter(steered.opened.defaults))

    def add(x, index):
        return x + strengths[:, None] * vector if index == 1 else x

    by_hand = scored(bs.CachedCausalLM(backbone), ids, layer_intercept_fn=add)
    edited = scored(steered, ids, controls={control: strengths})
    assert relative(edited, by_hand, ids["padding_mask"]) < 2e-6


def test_blocks_count_in_the_edited_graph(backbone, ids):
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Repeat("blocks.0", 2), bs.Capture("blocks.*")]))
    seen = []
    scored(lm, ids, layer_intercept_fn=lambda x, index: seen.append(index) or x)
    assert seen == [-1, *range(backbone.num_layers + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [pytest.param("generated", marks=pytest.mark.slow), "prompt"])
def test_lengths_of_prompts_score_a_text_as_it_was_generated(tokens, rng):
    """The likeliest next tokens are those that greedy search chose, row by row."""
    steer = bs.Steer("mood", {0: 3 * rng.normal(size=32)}, tokens=tokens)
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(num_layers=1), [steer]))
    lm.compile(sampler="greedy")
    lengths, new = np.array([4, 7]), 8
    text = lm.generate(ragged(rng, lengths, 7), max_new_tokens=new, stop_token_ids=None)
    chosen = lengths[:, None] + np.arange(new)
    wanted = np.take_along_axis(text["token_ids"], chosen, 1)

    def likeliest(ids, **options):
        best = scored(lm, ids, **options).argmax(-1)
        return np.take_along_axis(best, chosen - 1, 1)

    assert np.array_equal(likeliest(text, prompt_lengths=lengths), wanted)
    assert not np.array_equal(likeliest(text), wanted)
    row = {name: x[1:] for name, x in text.items()}
    whole = scored(lm, text, prompt_lengths=lengths.tolist())[1:]
    assert relative(scored(lm, row, prompt_lengths=7), whole) < 2e-6
    if tokens == "generated":
        control = {"mood": bs.Control(tokens=tokens)}
        unsaid = bs.CachedCausalLM(bs.operate(lm.opened.owner, [replace(steer, tokens="all")]))
        by_name = scored(unsaid, text, prompt_lengths=lengths, controls=control)
        assert relative(by_name, scored(lm, text, prompt_lengths=lengths)) == 0
        compiled = jax.jit(lambda **kw: unsaid.score(controls=control, prompt_lengths=[4, 7], **kw))
        for given in (text, {"token_ids": text["token_ids"]}):
            assert relative(np.asarray(compiled(**given))[1], by_name[1]) < 2e-6
        everywhere = {"mood": bs.Control(1.0, tokens="all")}
        by_name = scored(unsaid, text, controls=everywhere)
        compiled = jax.jit(lambda ids: unsaid.score(ids, controls=everywhere))
        assert relative(np.asarray(compiled(text["token_ids"]))[1], by_name[1]) < 2e-6
        with pytest.raises(bs.SurgeryError, match="since JAX traces `padding_mask`"):
            jax.jit(lambda **kw: unsaid.score(controls=everywhere, **kw))(**text)
        last = {"mood": bs.Control(1.0, tokens="last")}
        rows = {"mood_tokens": np.stack([lengths - 1, lengths, lengths], axis=1)}
        by_name = scored(unsaid, text, prompt_lengths=lengths, controls=last)
        assert relative(by_name, scored(unsaid, text, controls=rows)) == 0
        with pytest.raises(bs.SurgeryError, match=r"'moot': expected .*Did you mean 'mood'"):
            lm.score(text["token_ids"], controls={"moot": 1.0})
    # What is passed as an array goes before what the lengths say.
    controls = {"mood_tokens": np.array([[0, 15, 15]] * 2)}
    steered = scored(lm, text, prompt_lengths=0, controls=controls)
    everywhere = bs.CachedCausalLM(bs.operate(lm.opened.owner, [replace(steer, tokens="all")]))
    assert relative(steered, scored(everywhere, text), text["padding_mask"]) < 2e-6


@pytest.mark.slow
def test_inputs_put_in_by_hand_keep_their_values_beside_lengths(rng):
    backbone = make_gpt2(num_layers=1)
    scale = keras.Input((1,), name="scale")
    output = backbone.output * scale[:, None]
    model = keras.Model({**backbone.input, "scale": scale}, output)
    vector = {0: rng.normal(size=32)}
    lm = bs.CachedCausalLM(bs.operate(model, [bs.Steer("mood", vector, tokens="generated")]))
    ids, controls = {"token_ids": [[1, 2, 3]]}, {"scale": np.array([[2.0]], "float32")}
    whole = np.asarray(lm.score(**ids, controls=controls))
    assert relative(lm.score(**ids, controls=controls, prompt_lengths=3), whole) == 0
    assert relative(lm.score(**ids, controls=controls, prompt_lengths=1), whole) > 1e-2


@pytest.mark.slow
def test_gradients_of_the_embeddings(backbone, ids):
    """As in KerasHub's own example: how the loss depends on the embeddings."""
    lm = bs.CachedCausalLM(backbone)
    seen = {}
    keep = {"layer_intercept_fn": lambda x, index: seen.setdefault(index, x)}
    loss = {"scoring_mode": "loss", "target_ids": ids["token_ids"]}
    value = lm.score(**ids, **loss, **keep).sum()

    def run(embeddings):
        put = {"layer_intercept_fn": lambda x, index: embeddings if index == -1 else x}
        return lm.score(**ids, **loss, **put).sum()

    again, gradient = jax.value_and_grad(run)(seen[-1])
    step = 1e-2 * gradient / keras.ops.norm(gradient)
    difference = (run(seen[-1] + step) - run(seen[-1] - step)) / 2
    assert float(again) == pytest.approx(float(value), rel=1e-5)
    assert float(difference) == pytest.approx(float((gradient * step).sum()), rel=1e-2)


@pytest.mark.by_default(10)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scoring_mode": "probability"}, "'scoring_mode': expected 'logits' or 'loss'"),
        ({"scoring_mode": "loss"}, "'target_ids': expected token ids"),
        ({"scoring_mode": "loss", "target_ids": [[1, 2]]}, r"'target_ids': expected int\[1, 3\]"),
        ({"token_ids": [[1, 2**32 + 5]]}, "'token_ids': .* from 1 to 4294967301. Pass what"),
        ({"token_ids": [1, 2]}, r"'token_ids': expected int\[batch, time\]"),
        ({"padding_mask": [[1, 1]]}, r"'padding_mask': expected bool\[1, 3\]"),
        ({"padding_mask": [[1, 1, 2]]}, r"'padding_mask': expected bool\[1, 3\]"),
        ({"scoring_mode": np.array(["loss", "logits"])}, "expected 'logits' or 'loss'"),
        ({"token_ids": [[1] * 65]}, "expected rows of at most 64 tokens.* Received 65"),
        ({"layer_intercept_fn": "double"}, "'layer_intercept_fn': expected a function"),
        ({"layer_intercept_fn": lambda x, i: None}, r"expected activations \[1, 3, 32\] for index"),
        ({"layer_intercept_fn": lambda x, i: x[:, :1]}, r"index -1.* float32\[1, 1, 32\]"),
        ({"prompt_lengths": 4}, "'prompt_lengths': .* as the rows have: .3.+ Received 4"),
        (
            {"prompt_lengths": 3, "padding_mask": [[1, 1, 0]]},
            "'prompt_lengths': .* as the rows have: .2.+ Received 3",
        ),
        ({"prompt_lengths": -1}, "'prompt_lengths': expected an int"),
        ({"prompt_lengths": [1, 2]}, r"'prompt_lengths': .* int\[1\], one for each row"),
        ({"prompt_lengths": 1.5}, "'prompt_lengths': expected an int"),
        ({"prompt_lengths": "all"}, "'prompt_lengths': expected an int"),
        ({"controls": {"moot": [[1.0]]}}, "score at control 'moot': expected a control of this"),
        ({"controls": {"mood": "x"}}, "controls at 'mood': expected finite numbers"),
        ({"controls": {"mood_strength": [1.0]}}, r"'mood_strength': expected float32\[1, 1\]"),
        ({"controls": {"mood_strength": "x"}}, r"'mood_strength': expected float32\[1, 1\]"),
        ({"controls": [1.0]}, "score at 'controls': expected a dict"),
        ({"controls": {"token_ids": [[1]]}}, "score at control 'token_ids': expected a control"),
    ],
)
def test_bad_input(refusing, arguments, words):
    with pytest.raises(bs.SurgeryError, match=words):
        refusing.score(**{"token_ids": [[1, 2, 3]], **arguments})


@pytest.fixture(scope="module")
def refusing():
    return bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Steer("mood", {1: np.ones(32)})]))


def test_a_function_may_return_an_array(backbone, ids):
    lm = bs.CachedCausalLM(backbone)
    put = {"layer_intercept_fn": lambda x, index: np.asarray(x) * 2}
    expected = scored(lm, ids, layer_intercept_fn=lambda x, index: x * 2)
    assert relative(scored(lm, ids, **put), expected) < 1e-6


@pytest.mark.slow
def test_a_graph_without_the_embeddings_is_refused(backbone):
    opened = bs.open_backbone(backbone)
    opened.__dict__["family"] = replace(opened.family, embeddings="gone")
    with pytest.raises(bs.SurgeryError, match="expected the layer 'gone' in the graph"):
        interceptable(opened)
