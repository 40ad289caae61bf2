"""A spliced autoencoder equals NumPy; its features are a site; steering adds a decoder row."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from tests.autoencoders import ARCHITECTURES, arrays, decode, encode
from tests.autoencoders import save as save_saelens
from tests.helpers import make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

EXACT = 1e-5
NORM = "constant_norm_rescale"
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


# Every activation, spliced into a model.


@pytest.mark.slow
def test_splices_of_every_activation_generate_as_they_run(tmp_path, rng):
    """On a bundled model: NumPy, the uncached graph, the cached one and generation agree."""
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    weights, rewrites = {}, []
    for block, architecture in enumerate(ARCHITECTURES):
        w = weights[architecture] = arrays(rng, architecture, size=128, latents=256)
        path = save_saelens(tmp_path / architecture, w, architecture, normalize_activations=NORM)
        site = f"blocks.{block}"
        rewrites += [
            bs.Capture(site, name=f"raw_{architecture}"),
            bs.SparseAutoencoder(site, path, name=architecture),
            bs.Capture(site, f"{site}.sae_latents", name=architecture),
        ]
    edited = bs.operate(lm.backbone, rewrites)
    spliced = bs.CachedCausalLM(edited)
    spliced.compile(sampler="greedy")
    prompt = {"token_ids": np.array([[5, 9, 2, 30, 4]]), "padding_mask": np.ones((1, 5), "int32")}
    options = {"max_new_tokens": 4, "stop_token_ids": None, "return_captures": True}
    made, captures = spliced.generate(prompt, **options)
    ids = np.asarray(made["token_ids"])[:, :9]
    whole = edited.predict_on_batch({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    logits = edited.token_embedding(whole["hidden_states"], reverse=True)
    assert np.array_equal(np.argmax(logits, -1)[:, 4:8], ids[:, 5:9])
    for block, (architecture, w) in enumerate(weights.items()):
        site = f"blocks.{block}"
        x = np.asarray(whole["captures"][f"raw_{architecture}/{site}"])
        features = encode(x, w, architecture, normalize=NORM)
        wanted = {site: decode(x, features, w, NORM), f"{site}.sae_latents": features}
        for path, values in wanted.items():
            name = f"{architecture}/{path}"
            assert relative(whole["captures"][name], values) <= EXACT
            assert relative(np.asarray(captures[name])[:, :8], values[:, :8]) <= EXACT


# With the error kept.


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["topk", pytest.param("gated", marks=pytest.mark.slow)])
def test_with_the_error_only_an_edit_of_features_acts(architecture, tmp_path, rng):
    """x + amount · (decode(edited) - decode(features)), with the normalisation undone."""
    w = arrays(rng, architecture)
    path = save_saelens(tmp_path, w, architecture, normalize_activations=NORM)
    splice = bs.SparseAutoencoder("blocks.1", path, error=True)
    backbone, inputs = make_gpt2(), tokens(rng, rows=3)
    plain = run(bs.open_backbone(backbone), inputs)
    captures = [bs.Capture("blocks.1", "blocks.1.sae_latents")]
    untouched = bs.operate(backbone, [splice, *captures]).predict_on_batch(inputs)
    assert np.array_equal(untouched["hidden_states"], plain)
    x, features = (np.asarray(untouched["captures"][c]) for c in captures[0].at)
    assert relative(features, encode(x, w, architecture, normalize=NORM)) <= EXACT
    edited = features.copy()
    edited[:, 2:4] = rng.uniform(0, 2, edited[:, 2:4].shape)
    amounts = np.array([1, 0, 0.5], "float32")
    rewrites = [splice, bs.Patch("blocks.1.sae_latents"), *captures]
    model = bs.operate(backbone, rewrites)
    controls = {
        "patch_positions": np.tile([[2, 3]], (3, 1, 1)).astype("int32"),
        "patch_value_0": edited[:, 2:4],
        "sae_amount": amounts,
    }
    got = model.predict_on_batch({**inputs, **controls})
    assert relative(got["captures"]["blocks.1.sae_latents"], edited) <= EXACT
    change = [decode(x, f, w, NORM) for f in (edited, features)]
    wanted = x + amounts[:, None, None] * (change[0] - change[1])
    assert relative(got["captures"]["blocks.1"], wanted) <= EXACT
    assert np.abs(wanted - x).max() > 0.1
    assert np.array_equal(got["captures"]["blocks.1"][1], x[1])
    cached, _ = run_chunks(bs.rewire(model), inputs, [9], **controls)
    assert relative(cached, got["hidden_states"]) <= EXACT


def test_ablated_features_leave_the_error(sae, rng):
    path, w = sae
    rewrites = [
        bs.Capture("blocks.1", name="raw"),
        bs.SparseAutoencoder("blocks.1", path, error=True),
        bs.Ablate("blocks.1.sae_latents"),
        bs.Capture("blocks.1"),
    ]
    inputs = tokens(rng)
    edited = bs.operate(make_gpt2(), rewrites)
    got = edited.predict_on_batch(inputs)["captures"]
    x = np.asarray(got["raw/blocks.1"])
    assert relative(got["blocks.1"], x - latents_of(x, w) @ w["W_dec"]) <= EXACT
    # The layers do not depend on it: the same ones go on without the error.
    layers = edited.rewrites[1]
    again = bs.operate(make_gpt2(), [replace(layers, error=False), *rewrites[2:]])
    got = again.predict_on_batch(inputs)["captures"]["blocks.1"]
    assert relative(got, np.broadcast_to(w["b_dec"], got.shape)) <= EXACT


@pytest.mark.slow
def test_one_feature_is_taken_out(sae, rng):
    """As the guide does it."""
    path, w = sae
    keep = np.ones(LATENTS)
    keep[7] = 0
    site = "blocks.1.sae_latents"
    rewrites = [
        bs.Capture("blocks.1", name="raw"),
        bs.SparseAutoencoder("blocks.1", path, error=True),
        bs.Capture(site),
        bs.Insert(site, keras.layers.Rescaling(keep)),
        bs.Capture("blocks.1"),
    ]
    got = bs.operate(make_gpt2(), rewrites).predict_on_batch(tokens(rng, rows=4))["captures"]
    features = np.asarray(got[site])[..., 7:8]
    assert features.any()
    assert relative(got["blocks.1"], got["raw/blocks.1"] - features * w["W_dec"][7]) <= EXACT


@pytest.mark.slow
def test_heads_side_by_side(sae, rng):
    path, w = sae
    site = "blocks.1.head_outputs"
    rewrites = [
        bs.Capture(site, name="raw"),
        bs.SparseAutoencoder(site, path),
        bs.Capture(site, "blocks.1.sae_latents"),
    ]
    inputs = tokens(rng)
    got = bs.operate(make_gpt2(), rewrites).predict_on_batch(inputs)["captures"]
    x = np.asarray(got[f"raw/{site}"])
    latents = latents_of(x.reshape(2, 9, SIZE), w)
    assert relative(got["blocks.1.sae_latents"], latents) <= EXACT
    assert relative(got[site], (latents @ w["W_dec"] + w["b_dec"]).reshape(x.shape)) <= EXACT
    rewrites[1] = bs.SparseAutoencoder(site, path, feature=7, amount=2.0)
    got = bs.operate(make_gpt2(), [*rewrites[:2], bs.Capture(site)]).predict_on_batch(inputs)
    steered = x + 2 * w["W_dec"][7].reshape(x.shape[2:])
    assert relative(got["captures"][site], steered) <= EXACT


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
    refused("expected `error` for a splice alone", feature=3, error=True)
    refused("expected `error` to be True or False", error=1)
    refused("expected the path of a folder or file, or `layers`", where="")
    for first, second in (("blocks.1.mlp_output", "blocks.1"), ("final_norm", "embeddings")):
        pair = [bs.SparseAutoencoder(first, path), bs.SparseAutoencoder(second, path, name="b")]
        with pytest.raises(bs.SurgeryError, match=f"'{second}': expected a block without another"):
            bs.operate(backbone, pair)
    refused("Received a path where nothing is. Pass the folder", where=str(tmp_path / "nowhere"))
    plain = "expected a top-k autoencoder, not signed. Received "
    number = "expected `k` from 1 to 24, the number of latents. Received "
    changes = [
        ({"signed": True}, f"{plain}{{'signed': True}}"),
        ({"transcode": True}, "expected an autoencoder, no transcoder. Received "),
        ({"activation": "groupmax"}, f"{plain}'groupmax'"),
        ({"k": 0}, f"{number}0"),
        ({"k": LATENTS + 1}, f"{number}25"),
    ]
    folder = tmp_path / "changed"
    folder.mkdir()
    for change, words in changes:
        refused(words, where=save(folder, w, **change))
    less = {k: v for k, v in w.items() if k != "b_dec"}
    refused(r"arrays encoder.weight \[latents, size\]", where=save(folder, less))


@pytest.mark.slow
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
