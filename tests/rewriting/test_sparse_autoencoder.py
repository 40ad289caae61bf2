"""A spliced autoencoder equals NumPy; its features are a site; steering adds a decoder row."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from tests.helpers import make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

EXACT = 1e-5
LATENTS, SIZE, K = 24, 32, 5


def weights(rng):
    return {
        "encoder.weight": rng.normal(0, 0.5, (LATENTS, SIZE)).astype("float32"),
        "encoder.bias": rng.normal(0, 0.1, LATENTS).astype("float32"),
        "W_dec": rng.normal(0, 0.3, (LATENTS, SIZE)).astype("float32"),
        "b_dec": rng.normal(0, 0.2, SIZE).astype("float32"),
    }


def save(folder, tensors, **config):
    save_file(tensors, folder / "sae.safetensors")
    config = {"k": K, "num_latents": LATENTS, "d_in": SIZE, "signed": False, **config}
    (folder / "cfg.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def sae(tmp_path, rng):
    tensors = weights(rng)
    return save(tmp_path, tensors), tensors


def latents_of(x, w):
    features = np.maximum((x - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"], 0)
    kept = np.zeros_like(features)
    best = np.argsort(-features, axis=-1)[..., :K]
    np.put_along_axis(kept, best, np.take_along_axis(features, best, -1), -1)
    return kept


def test_spliced_reconstruction_equals_numpy(sae, rng):
    path, w = sae
    backbone = make_gpt2()
    rewrites = [
        bs.Capture("blocks.1", name="raw"),
        bs.SparseAutoencoder("blocks.1", path),
        bs.Capture("blocks.1", "blocks.1.sae_latents"),
    ]
    edited = bs.operate(backbone, rewrites)
    inputs = tokens(rng, rows=3)
    amounts = {"sae_amount": np.array([1, 0, 0.5], "float32")}
    got = edited.predict_on_batch({**inputs, **amounts})
    x = np.asarray(got["captures"]["raw/blocks.1"])
    latents = latents_of(x, w)
    made = latents @ w["W_dec"] + w["b_dec"]
    assert ((latents > 0).sum(-1) <= K).all()
    assert relative(got["captures"]["blocks.1.sae_latents"], latents) <= EXACT
    wanted = np.stack([made[0], x[1], 0.5 * (x[2] + made[2])])
    assert relative(got["captures"]["blocks.1"], wanted) <= EXACT
    assert np.array_equal(got["captures"]["blocks.1"][1], x[1])
    cached, captures = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], **amounts)
    assert relative(cached, got["hidden_states"]) <= EXACT
    assert relative(captures["blocks.1.sae_latents"], latents) <= EXACT
    assert not {v.path for v in edited.trainable_variables if "sae" in v.path}
    assert len(edited.trainable_variables) == len(backbone.trainable_variables)


def test_features_can_be_ablated_as_any_site(sae, rng):
    path, w = sae
    rewrites = [
        bs.Capture("blocks.1", name="raw"),
        bs.SparseAutoencoder("blocks.1", path),
        bs.Ablate("blocks.1.sae_latents"),
        bs.Capture("blocks.1"),
    ]
    got = bs.operate(make_gpt2(), rewrites).predict_on_batch(tokens(rng))["captures"]
    assert relative(got["blocks.1"], np.broadcast_to(w["b_dec"], (2, 9, SIZE))) <= EXACT


@pytest.mark.slow
def test_a_feature_is_a_direction(sae, rng):
    path, w = sae
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.SparseAutoencoder("blocks.1", path, feature=7)])
    steered = bs.operate(backbone, [bs.Steer("s", {1: w["W_dec"][7]})])
    inputs = tokens(rng)
    amounts = np.array([0, 4], "float32")
    got = run(edited, {**inputs, "sae_amount": amounts})
    assert np.array_equal(got[0], run(bs.open_backbone(backbone), inputs)[0])
    assert relative(got, run(steered, {**inputs, "s_strength": amounts[:, None]})) <= EXACT
    lm, other = bs.CachedCausalLM(edited), bs.CachedCausalLM(steered)
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    texts = []
    for model, name in ((lm, "sae"), (other, "s")):
        model.compile(sampler="greedy")
        prompt = ragged(np.random.default_rng(3), (3, 5), 5)
        made = model.generate(prompt, controls={name: [0.0, 9.0]}, **options)
        texts.append(made["token_ids"])
    assert np.array_equal(*texts)


def test_errors(sae, tmp_path, rng):
    path, w = sae
    backbone = make_gpt2()

    def refused(words, at="blocks.1", where=path, **kwargs):
        with pytest.raises(bs.SurgeryError, match=words):
            bs.operate(backbone, [bs.SparseAutoencoder(at, where, **kwargs)])

    refused("expected one site, the one that it was trained", at="blocks.*")
    refused(r"'blocks.1.query': expected one for \[4, 8\]", at="blocks.1.query")
    refused("expected a feature from 0 to 23", feature=24)
    refused("expected the path of a folder, or `layers`", where="")
    pair = [
        bs.SparseAutoencoder(at, path, name=f"sae{len(at)}")
        for at in ("blocks.1.mlp_output", "blocks.1")
    ]
    with pytest.raises(bs.SurgeryError, match=r"'blocks\.1': expected a block without another spl"):
        bs.operate(backbone, pair)
    refused("without cfg.json and sae.safetensors", where=str(tmp_path / "nowhere"))
    for name, change in (("a", {"signed": True}), ("b", {"k": 0}), ("c", {"transcode": True})):
        folder = tmp_path / name
        folder.mkdir()
        refused("expected a top-k autoencoder", where=save(folder, w, **change))
    folder = tmp_path / "d"
    folder.mkdir()
    refused("k of at most that many", where=save(folder, w, k=LATENTS + 1))
    less = {k: v for k, v in w.items() if k != "b_dec"}
    refused("expected weights encoder.weight", where=save(folder, less))


def test_layers_go_on_with_the_same_feature_alone(sae, rng):
    """What the model remembers needs no file, and is no other feature by a change of a number."""
    path, _ = sae
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.SparseAutoencoder("blocks.1", path, feature=7)])
    rewrite = edited.rewrites[0]
    assert rewrite.path == ""
    inputs = tokens(rng)
    assert np.array_equal(run(bs.operate(backbone, [rewrite]), inputs), run(edited, inputs))
    for feature in (4, None):
        with pytest.raises(bs.SurgeryError, match=f"`layers` made for feature {feature}"):
            bs.operate(backbone, [replace(rewrite, feature=feature)])
