"""Ablating equals a plain computation in which the heads, or the sites, are replaced."""

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.helpers import make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

EXACT = 1e-5


@pytest.fixture(scope="module")
def gpt2():
    """One backbone for all tests that change nothing of it."""
    return make_gpt2()


def after(backbone, inputs, replace):
    """What comes out of block 1's attention when its heads' mix is `replace(mix)`, in NumPy."""
    edited = bs.operate(backbone, [bs.Capture("blocks.1.*")])
    captures = edited.predict_on_batch(inputs)["captures"]
    layer = backbone.transformer_layers[1]
    attention = getattr(layer, "attention", None) or layer._self_attention_layer
    dense = (getattr(attention, "output_dense", None) or attention._output_dense).get_weights()
    mixed = replace(np.array(captures["blocks.1.head_outputs"]))
    out = np.einsum("bthd,hdm->btm", mixed, dense[0]) + (dense[1] if len(dense) > 1 else 0)
    return captures, mixed, out


@pytest.mark.slow
def test_zeroed_heads_are_missing_from_the_output(gpt2, rng):
    inputs = tokens(rng)

    def zero(mixed):
        mixed[:, :, [1, 3]] = 0
        return mixed

    _, mixed, out = after(gpt2, inputs, zero)
    rewrites = [bs.Ablate("blocks.1.head_outputs", heads=[1, 3]), bs.Capture("blocks.1.*")]
    edited = bs.operate(gpt2, rewrites)
    got = edited.predict_on_batch(inputs)
    assert np.array_equal(got["captures"]["blocks.1.head_outputs"] == 0, mixed == 0)
    assert relative(got["captures"]["blocks.1.head_outputs"], mixed) <= EXACT
    assert relative(got["captures"]["blocks.1.attention_output"], out) <= EXACT
    cached = run_chunks(bs.rewire(edited), inputs, [4, 1, 4])[0]
    assert relative(cached, got["hidden_states"]) <= EXACT
    pattern = bs.operate(gpt2, [bs.Ablate("blocks.1.attention_pattern", heads=[1, 3])])
    assert relative(run(pattern, inputs), got["hidden_states"]) <= EXACT
    chunks = run_chunks(bs.rewire(pattern), inputs, [4, 1, 4])[0]
    assert relative(chunks, got["hidden_states"]) <= EXACT


@pytest.mark.slow
def test_masks_are_controls_for_each_row(gpt2, rng):
    inputs = tokens(rng, rows=3)
    edited = bs.operate(gpt2, [bs.Ablate("blocks.0:2.head_outputs", heads=[0])])
    masks = np.zeros((3, 2, 4), "float32")
    masks[1, :, 0] = masks[2, 1, 2] = 1
    got = run(edited, {**inputs, "ablate_heads": masks})
    assert np.array_equal(got[0], run(bs.open_backbone(gpt2), inputs)[0])
    assert np.array_equal(got[1], run(edited, inputs)[1])
    other = bs.operate(gpt2, [bs.Ablate("blocks.1.head_outputs", heads=[2])])
    assert relative(got[2], run(other, inputs)[2]) <= EXACT
    assert relative(got[2], got[0][None].repeat(3, 0)[2]) > 1e-3


def test_mean_and_resample(gpt2, rng):
    inputs = tokens(rng)
    mean = rng.normal(size=(4, 8)).astype("float32")
    pool = rng.normal(size=(5, 32)).astype("float32")
    path = "blocks.0.head_outputs"
    rewrites = [
        bs.Ablate(path, heads=[2], to="mean", values={path: mean}, name="a"),
        bs.Ablate("blocks.1", to="resample", values={"blocks.1": pool}, name="b"),
        bs.Capture(path, "blocks.1"),
    ]
    edited = bs.operate(gpt2, rewrites)
    starts = {"b_start": np.array([0, 3], "int32")}
    plain = bs.operate(gpt2, [bs.Capture(path)]).predict_on_batch(inputs)["captures"][path]
    got = edited.predict_on_batch({**inputs, **starts})
    keep = [0, 1, 3]
    assert np.array_equal(got["captures"][path][:, :, keep], plain[:, :, keep])
    assert np.array_equal(got["captures"][path][:, :, 2], np.tile(mean[2], (2, 9, 1)))
    wanted = np.stack([pool[np.arange(9) % 5], pool[(np.arange(9) + 3) % 5]])
    assert np.array_equal(got["captures"]["blocks.1"], wanted)
    cached, captures = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], **starts)
    assert np.array_equal(captures["blocks.1"], wanted)
    assert relative(cached, got["hidden_states"]) <= EXACT


@pytest.mark.slow
def test_ablation_in_generation(rng):
    backbone = make_gpt2()
    rewrites = [bs.Capture("blocks.*.mlp_output", name="raw")]
    reference = bs.CachedCausalLM(bs.operate(backbone, rewrites))
    reference.compile(sampler="greedy")
    inputs, options = ragged(rng, (3, 6), 6), {"max_new_tokens": 6, "stop_token_ids": None}
    plain, captures = reference.generate(inputs, return_captures=True, **options)
    means = {k.removeprefix("raw/"): v for k, v in captures.mean().items()}
    ablate = bs.Ablate("blocks.1.mlp_output", to="mean", values=means)
    lm = bs.CachedCausalLM(bs.operate(backbone, [ablate, bs.Capture("blocks.1.mlp_output")]))
    lm.compile(sampler="greedy")
    got, captures = lm.generate(
        inputs, controls={"ablate": [0, 1]}, return_captures=True, **options
    )
    assert np.array_equal(got["token_ids"][0], plain["token_ids"][0])
    seen = captures["blocks.1.mlp_output"][1, :11]
    assert np.array_equal(seen, np.tile(means["blocks.1.mlp_output"], (11, 1)))
    with pytest.raises(bs.SurgeryError, match=r"'ablate': expected finite numbers.*\[2, 1, 1\]"):
        lm.generate(inputs, controls={"ablate": np.ones((2, 2))}, **options)
    with pytest.raises(bs.SurgeryError, match=r"'ablate': expected heads, and `start` .* Received"):
        lm.generate(inputs, controls={"ablate": {"start": 1}}, **options)
    with pytest.raises(bs.SurgeryError, match=r"expected 1 to ablate a head, 0.*Received 0.5"):
        lm.generate(inputs, controls={"ablate": 0.5}, **options)


def test_resampling_starts_at_a_whole_number(rng):
    values = {"blocks.1": rng.normal(size=(3, 32))}
    lm = bs.CachedCausalLM(
        bs.operate(make_gpt2(), [bs.Ablate("blocks.1", to="resample", values=values)])
    )
    inputs = ragged(rng, (3, 6), 8)
    for start in (1.5, 2**32, 2**31 - 1, [True, False], [1, 2, 3]):
        with pytest.raises(bs.SurgeryError, match=r"expected a whole number as `start`.* Received"):
            lm.generate(inputs, stop_token_ids=None, controls={"ablate": {"start": start}})
    exact = {"ablate": {"start": np.array([2**24 + 1, -1])}}
    bound = bind_controls(lm.opened, exact, np.array([3, 6]))["ablate_start"]
    assert bound.tolist() == [2**24 + 1, -1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at": "blocks.1.head_outputs", "heads": [4]}, "expected heads from 0 to 3"),
        ({"at": "blocks.1.head_outputs", "heads": []}, "`heads` to be a head, counted from 0"),
        ({"at": "blocks.1.head_outputs", "heads": [True]}, "`heads` to be a head"),
        ({"at": "blocks.1.head_outputs", "heads": [2**32]}, r"Received \[4294967296\]"),
        ({"at": "blocks.1.mlp_output", "heads": [0]}, "expected no heads, since it has none"),
        ({"at": "blocks.1.*"}, "expected sites with as many heads each"),
        ({"at": "blocks.1", "to": "mean"}, "'mean' or 'resample' with them"),
        ({"at": "blocks.1", "to": "nothing"}, "to 'zero' or 'mean' or 'resample'. Received"),
        ({"at": "blocks.1", "to": "mean", "values": {3: np.ones(32)}}, "`values` to be {site"),
        ({"at": "blocks.1", "values": {}}, "expected to='zero' without"),
        (
            {"at": "blocks.1", "to": "mean", "values": {"blocks.0": np.zeros(32)}},
            r"'blocks.1': expected values for each site .* some for \['blocks.0'\]",
        ),
        (
            {
                "at": "blocks.1.attention_pattern",
                "to": "mean",
                "values": {"blocks.1.attention_pattern": np.zeros(4)},
            },
            "expected values of shape zero",
        ),
    ],
)
def test_errors(gpt2, options, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(gpt2, [bs.Ablate(**options)])
