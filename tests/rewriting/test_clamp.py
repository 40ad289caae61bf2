"""Clamped features equal NumPy, row by row, in every way a model is run."""

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.serving.web.steering import Vectors, read_steering
from tests.edits import save_autoencoder
from tests.families import ROWS
from tests.helpers import make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

LATENTS, SIZE, EXACT = 40, 32, 1e-5


@pytest.fixture
def spliced(tmp_path, rng):
    """A model whose autoencoder keeps the error, with features clamped; and its weights."""
    w = save_autoencoder(tmp_path / "sae", rng, SIZE, latents=LATENTS)
    rewrites = [
        bs.Capture("blocks.1", name="raw"),
        bs.SparseAutoencoder("blocks.1", str(tmp_path / "sae"), error=True),
        bs.Capture("blocks.1.sae_latents", name="before"),
        bs.Clamp("blocks.1.sae_latents"),
        bs.Capture("blocks.1", "blocks.1.sae_latents", name="after"),
    ]
    return bs.operate(make_gpt2(), rewrites), w


def test_features_of_an_autoencoder_row_by_row(spliced, rng):
    edited, w = spliced
    inputs = tokens(rng, rows=3)
    features = np.array([[7, 2], [11, -1], [-1, -1]], "int32")
    values = np.array([[0.0, 4.0], [-2.0, 9.0], [5.0, 5.0]], "float32")
    controls = {"clamp_features": features, "clamp_values": values}
    got = edited.predict_on_batch({**inputs, **controls})["captures"]
    latents, raw = np.array(got["before/blocks.1.sae_latents"]), got["raw/blocks.1"]
    wanted = latents.copy()
    wanted[0, :, 7], wanted[0, :, 2], wanted[1, :, 11] = 0, 4, -2
    np.testing.assert_array_equal(got["after/blocks.1.sae_latents"], wanted)
    moved = (wanted - latents) @ w["W_dec"]
    assert relative(got["after/blocks.1"], raw + moved) <= EXACT
    np.testing.assert_array_equal(got["after/blocks.1"][2], raw[2])
    _, cached = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], **controls)
    assert relative(cached["after/blocks.1"], got["after/blocks.1"]) <= EXACT


def clamped(backbone, at="blocks.1.mlp_hidden", **settings):
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Clamp(at, **settings)]))
    lm.compile(sampler="greedy")
    return lm


class Fixed(keras.layers.Layer):
    """Neurons set by hand, at all tokens."""

    def __init__(self, neurons, **kwargs):
        super().__init__(**kwargs)
        self.neurons = neurons

    def call(self, x):
        kept = np.ones(x.shape[-1], "float32")
        kept[list(self.neurons)] = 0
        new = np.zeros_like(kept)
        new[list(self.neurons)] = list(self.neurons.values())
        return x * kept + new


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "qwen3_5", "rwkv7"])
def test_texts_are_those_of_models_built_for_each_row(family, rng):
    backbone = ROWS[family].make()
    site = "blocks.1.mlp_hidden"
    if site not in bs.sites(bs.open_backbone(backbone)):
        site = "blocks.1.mlp_output"
    prompts = ragged(rng, (3, 5, 4), 6)
    rows = [{4: 3.0, 9: -3.0}, {0: 8.0}, {}]
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Clamp(site)]))
    lm.compile(sampler="greedy")
    control = {
        "features": [[4, 9], [0, -1], [-1, -1]],
        "values": [[3.0, -3.0], [8.0, 0.0], [0.0, 0.0]],
    }
    options = {"max_new_tokens": 8, "stop_token_ids": None}
    got = lm.generate(prompts, controls={"clamp": control}, **options)["token_ids"]
    for i, neurons in enumerate(rows):
        edits = [bs.Insert(site, Fixed(neurons))] if neurons else []
        other = bs.CachedCausalLM(bs.operate(backbone, edits))
        other.compile(sampler="greedy")
        alone = {name: value[i : i + 1] for name, value in prompts.items()}
        wanted = other.generate(alone, **options)["token_ids"][0]
        count = int(prompts["padding_mask"][i].sum()) + 8
        np.testing.assert_array_equal(got[i][:count], wanted[:count])


@pytest.mark.slow
def test_what_a_call_leaves_out_is_as_in_the_rewrite(rng):
    backbone = make_gpt2()
    prompts = ragged(rng, (4, 4), 4)

    def ids(lm, control=None):
        controls = None if control is None else {"clamp": control}
        options = {"max_new_tokens": 6, "stop_token_ids": None}
        return lm.generate(prompts, controls=controls, **options)["token_ids"].tolist()

    lm = clamped(backbone, features=(3, 30), values=(6.0, -6.0))
    none, own = clamped(backbone), ids(lm)
    assert ids(none) != own
    assert ids(lm, {"features": [-1]}) == ids(none)
    assert ids(none, {"features": [30, 3], "values": [-6, 6]}) == own
    assert ids(lm, {"values": [6, -6]}) == own
    with pytest.raises(bs.SurgeryError, match=r"\[1\] \(one for each feature\)"):
        ids(lm, {"features": [3]})
    assert ids(lm, 5.0) == ids(none, {"features": [3, 30], "values": 5.0})
    assert ids(lm, [5.0, -4.0]) == ids(none, {"features": [3, 30], "values": [[5], [-4]]})
    later = {"features": [3], "values": 90.0, "tokens": "generated"}
    always = {**later, "tokens": "all"}
    assert ids(none, later) != ids(none, always)
    generated = clamped(backbone, features=(3,), values=90.0, tokens="generated")
    assert ids(generated) == ids(none, later)


@pytest.mark.slow
def test_up_to_four_features_compile_nothing_new(rng):
    lm, prompts = clamped(make_gpt2()), ragged(rng, (4, 4), 4)

    def run(features):
        clamp = {"features": features, "values": 1.0}
        lm.generate(prompts, controls={"clamp": clamp}, max_new_tokens=3, stop_token_ids=None)
        return dict(lm.programs.compilations)

    before = run([1])
    assert run([2, 3, 4, 5]) == run([[0], [9]]) == before
    assert run([0, 1, 2, 3, 4]) != before


@pytest.mark.slow
def test_a_rewrite_of_more_features_compiles_nothing_new_for_fewer(rng):
    lm, prompts = clamped(make_gpt2(), features=np.arange(6), values=1.0), ragged(rng, (4, 4), 4)

    def run(clamp):
        controls = {"clamp": clamp} if clamp else None
        lm.generate(prompts, controls=controls, max_new_tokens=3, stop_token_ids=None)
        return dict(lm.programs.compilations)

    assert run(None) == run({"features": [1]}) == run({"features": [*range(8)]})


@pytest.mark.slow
def test_features_that_are_none_take_no_room():
    lm = clamped(make_gpt2())
    clamp = {"features": [[-1] * 5000, [-1] * 4999 + [3]], "values": 2.0}
    bound = bind_controls(lm.opened, {"clamp": clamp}, np.array([3, 3]))
    assert bound["clamp_features"].tolist() == [[-1] * 4, [3, -1, -1, -1]]
    many = clamped(keras_hub.models.GPT2Backbone(60, 1, 2, 16, 300), at="blocks.0.mlp_hidden")
    with pytest.raises(bs.SurgeryError, match="expected at most 256 features in a row"):
        bind_controls(many.opened, {"clamp": {"features": [*range(257)]}}, np.array([3]))


@pytest.mark.slow
def test_a_sweep_over_values():
    bundled = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm = bs.CachedCausalLM(
        bs.operate(bundled.backbone, [bs.Clamp("blocks.1.mlp_hidden")]), bundled.preprocessor
    )
    lm.compile(sampler="greedy")
    prompt, clamp = "Once upon a time", {"features": [3, 4]}
    options = {"max_new_tokens": 6}
    swept = bs.sweep(lm, [prompt], "clamp", [0.0, 90.0], controls={"clamp": clamp}, **options)
    for row in swept.rows:
        controls = {"clamp": {**clamp, "values": row.strength}}
        wanted = lm.generate(prompt, controls=controls, strip_prompt=True, **options)
        assert row.text == wanted


@pytest.mark.slow
def test_the_engine_and_a_prefix_that_features_would_change(rng):
    lm = clamped(make_gpt2())
    prompts = [rng.integers(1, 60, 40).tolist() for _ in range(3)]
    clamps = [
        {"features": [4], "values": 7.0},
        {"features": list(range(7)), "values": [9.0] * 7},
        {"features": [4], "values": 7.0, "tokens": "generated"},
    ]
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=16)
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    asked = [(p, c) for p in prompts[:2] for c in (*clamps, None)]

    def inputs(prompt):
        ids = np.array([prompt])
        return {"token_ids": ids, "padding_mask": np.ones_like(ids)}

    def controls(clamp):
        return {} if clamp is None else {"clamp": clamp}

    sent = [engine.submit(inputs(p), controls=controls(c), **options) for p, c in asked]
    while engine.step():
        pass
    for (prompt, clamp), request in zip(asked, sent, strict=True):
        wanted = lm.generate(inputs(prompt), controls=controls(clamp), **options)["token_ids"][0]
        np.testing.assert_array_equal(request.result(), wanted)
    engine.close()


def test_a_request_says_it_in_json():
    lm = clamped(make_gpt2())
    steering = {"clamp": {"features": [3, 4], "values": 2.0, "tokens": [2, None]}}
    controls = read_steering(lm, Vectors(lm, {}), steering, 64, {})
    prompt = {"token_ids": [[1, 2, 3, 4]], "padding_mask": [[1, 1, 1, 1]]}
    options = {"max_new_tokens": 4, "stop_token_ids": None}
    got = lm.generate(prompt, controls=controls, **options)["token_ids"]
    clamp = {"features": [[3, 4]], "values": [[2.0, 2.0]], "tokens": (2, None)}
    wanted = lm.generate(prompt, controls={"clamp": clamp}, **options)["token_ids"]
    np.testing.assert_array_equal(got, wanted)


def test_a_recipe_holds_it(tmp_path, rng):
    backbone, inputs = make_gpt2(), tokens(rng)
    clamp = bs.Clamp("blocks.0.mlp_hidden", (5, 6), (1.0, 2.0), tokens=(1, None), name="two")
    edited = bs.operate(backbone, [clamp])
    bs.save_recipe(edited, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", backbone)
    (rewrite,) = loaded.rewrites
    assert (rewrite.features, rewrite.values, rewrite.tokens) == ((5, 6), (1.0, 2.0), (1, None))
    np.testing.assert_array_equal(run(loaded, inputs), run(edited, inputs))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"features": (1, 1)}, "expected up to 256 features from 0 on, each once"),
        ({"features": (-1,)}, "expected up to 256 features from 0 on, each once"),
        ({"features": 3}, "expected up to 256 features from 0 on, each once"),
        ({"features": range(257)}, "expected up to 256 features from 0 on, each once"),
        ({"features": (1, 2), "values": (1.0,)}, r"or one for each feature, \[2\]"),
        ({"values": float("nan")}, "`values` to be a finite number"),
        ({"features": (64,)}, "expected features from 0 to 63. Received 64"),
    ],
)
def test_settings_that_no_model_can_use(settings, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(make_gpt2(), [bs.Clamp("blocks.0.mlp_hidden", **settings)])


@pytest.mark.parametrize(
    "at", ["blocks.*.mlp_hidden", "blocks.0.query", "blocks.0.attention_pattern"]
)
def test_sites_that_have_no_row_of_numbers(at):
    with pytest.raises(bs.SurgeryError, match="expected one site with a row of numbers for each"):
        bs.operate(make_gpt2(), [bs.Clamp(at)])


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"feature": [1]}, "expected a dict of features, values, tokens"),
        ({"features": [64]}, "from 0 to 63, or -1 for none"),
        ({"features": [1, 1]}, "each once in a row"),
        ({"features": []}, r"expected features int\[n\]"),
        ({"features": [[1], [2], [3]]}, r"expected features int\[n\] or int\[2, n\]"),
        ({"features": [1.5]}, r"expected features int\[n\]"),
        ({"features": [1, 2], "values": [1.0, 2.0, 3.0]}, r"\[2\] \(one for each feature\)"),
        ({"features": [1], "values": float("inf")}, "expected values, a finite number"),
        ({"features": [1], "tokens": "some"}, "expected tokens"),
        ({"features": [[1, 2], [3]]}, "fill shorter rows up with -1"),
        ({"features": [1], "values": [1.0, 2.0]}, r"feature\), \[2, 1\]\. Received"),
        ({"values": 3.0}, "expected features to set, since the `Clamp` names none"),
        ({}, "expected features to set, since the `Clamp` names none. Received {}"),
        (3.0, "Name `features` in the `Clamp`, or pass them with the values"),
        ("all", "or a dict; see `Clamp`"),
    ],
)
def test_controls_that_say_nothing_are_refused(control, words, rng):
    lm, prompts = clamped(make_gpt2()), ragged(rng, (3, 3), 3)
    with pytest.raises(bs.SurgeryError, match=words):
        lm.generate(prompts, controls={"clamp": control}, stop_token_ids=None)
