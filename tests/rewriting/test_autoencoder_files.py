"""Autoencoders of SAELens and Gemma Scope compute what their definitions say, in NumPy."""

import json
import zipfile

import keras
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.rewriting.autoencoder_files import read_autoencoder
from backbone_surgery.rewriting.autoencoder_layers import decoder_of, encoder_of, largest
from tests.autoencoders import (
    ARCHITECTURES,
    BIASES,
    LATENTS,
    SIZE,
    K,
    arrays,
    decode,
    encode,
    save,
    save_gemma_scope,
)
from tests.autoencoders import largest as largest_in_numpy
from tests.helpers import relative

EXACT = 2e-6


def compare(path, w, architecture, x, factor=1.0, **settings):
    """Compare an autoencoder that was read with its definition."""
    read = read_autoencoder(path)
    features = np.asarray(encoder_of(read, "encoder")(x))
    wanted = encode(x, w, architecture, **settings)
    assert relative(features, wanted) <= EXACT
    assert 0 < (features > 0).mean() < 0.7
    settings.pop("centered", None)
    made = decoder_of(read, "decoder")(x, features, np.ones(len(x), "float32"))
    assert relative(made, decode(x, wanted, w, factor=factor, **settings)) <= EXACT


@pytest.fixture
def x(rng):
    return (3 * rng.normal(size=(2, 9, SIZE)) + 0.5).astype("float32")


@pytest.mark.by_default(4)
@pytest.mark.parametrize("normalize", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saelens(architecture, centered, normalize, tmp_path, rng, x):
    w = arrays(rng, architecture)
    config = {"apply_b_dec_to_input": centered, "normalize_activations": normalize}
    path = save(tmp_path, w, architecture, **config)
    compare(path, w, architecture, x, centered=centered, normalize=normalize)


def test_top_k_by_the_decoders_norm(tmp_path, rng, x):
    w = arrays(rng, "topk")
    path = save(tmp_path, w, "topk", rescale_acts_by_decoder_norm=True)
    compare(path, w, "topk", x, rescaled=True)
    plain = encode(x, w, "topk") > 0
    assert (plain != (encode(x, w, "topk", rescaled=True) > 0)).any()
    np.testing.assert_allclose(np.linalg.norm(read_autoencoder(path).decoder, axis=1), 1, 1e-5)


OLD = {
    "d_in": SIZE,
    "d_sae": LATENTS,
    "dtype": "torch.float32",
    "hook_point": "blocks.1.hook_resid_post",
    "activation_fn": "relu",
}
"""What SAELens wrote before it named an architecture."""


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("standard", OLD),
        ("standard", {**OLD, "normalize_activations": False}),
        ("standard", {**OLD, "normalize_activations": None, "finetuning_scaling_factor": False}),
        ("topk", {**OLD, "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}),
        ("topk", {"architecture": "topk", "activation_fn_str": "topk", "k": K}),
        (
            "topk",
            {"architecture": "topk", "activation_fn": "topk", "activation_fn_kwargs": {"k": K}},
        ),
        ("gated", {**OLD, "architecture": "gated", "activation_fn_kwargs": {}}),
        ("jumprelu", {**OLD, "architecture": "jumprelu", "activation_fn_kwargs": None}),
    ],
)
def test_settings_of_older_releases(architecture, config, tmp_path, rng, x):
    w = arrays(rng, architecture)
    path = save(tmp_path, w, architecture)
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    compare(path, w, architecture, x)


@pytest.mark.parametrize("name", ["scaling_factor", "finetuning_scaling_factor"])
def test_the_factor_of_finetuning(name, tmp_path, rng, x):
    w = arrays(rng, "standard")
    factor = rng.uniform(0.5, 2, LATENTS).astype("float32")
    path = save(tmp_path / "a", {**w, name: factor}, "standard", finetuning_scaling_factor=True)
    compare(path, w, "standard", x, factor)
    row = w["W_dec"][3] * factor[3]
    np.testing.assert_allclose(read_autoencoder(path).decoder[3], row, 1e-6)
    # Ones that were stored for nothing say nothing.
    path = save(tmp_path / "b", {**w, name: np.ones(LATENTS, "float32")}, "standard")
    compare(path, w, "standard", x)


@pytest.mark.parametrize("kind", ["folder", "file", "safetensors"])
def test_gemma_scope(kind, tmp_path, rng, x):
    w = arrays(rng, "jumprelu")
    path = save_gemma_scope(tmp_path, w)
    if kind == "file":
        path = (tmp_path / "params.npz").rename(tmp_path / "layer_1.npz")
    if kind == "safetensors":
        (tmp_path / "params.npz").unlink()
        lower = {name.replace("W_", "w_"): array for name, array in w.items()}
        save_file(lower, tmp_path / "params.safetensors")
        hook = "model.layers.1.output"
        hooks = {"hf_hook_point_in": hook, "hf_hook_point_out": hook}
        (tmp_path / "config.json").write_text(json.dumps(hooks))
    compare(path, w, "jumprelu", x, centered=False)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_arrays_of_other_dtypes(dtype, tmp_path, rng, x):
    w = {name: array.astype(dtype) for name, array in arrays(rng, "jumprelu").items()}
    compare(save_gemma_scope(tmp_path, w), w, "jumprelu", x, centered=False)
    assert read_autoencoder(tmp_path).encoder.dtype == np.float32


def test_dtypes_that_numpy_does_not_know(tmp_path, rng):
    w = arrays(rng, "jumprelu")
    path = save_gemma_scope(tmp_path, {**w, "b_dec": w["b_dec"].astype(ml_dtypes.bfloat16)})
    words = r"Received \{'b_dec': '\|V2'\}\. Save them as float32.*bfloat16"
    with pytest.raises(bs.SurgeryError, match=words):
        read_autoencoder(path)


def test_a_token_of_zeros_is_encoded(tmp_path, rng):
    for how in ("constant_norm_rescale", "layer_norm"):
        w = arrays(rng, "standard")
        read = read_autoencoder(save(tmp_path, w, "standard", normalize_activations=how))
        x = np.zeros((1, 2, SIZE), "float32")
        features = encoder_of(read, "encoder")(x)
        made = decoder_of(read, "decoder")(x, features, np.ones(1, "float32"))
        assert np.isfinite(features).all()
        assert np.abs(made).max() <= 1e-6


@pytest.mark.by_default(1)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_keeps_k_where_features_are_equal(k):
    rows = [[2, 2, 2, 2, 2, 2], [0, 3, 1, 1, 1, 3], [0, 0, 0, 0, 0, 0], [0, 0, 5, 0, 0, 0]]
    features = np.array(rows, "float32").reshape(2, 2, 6)
    kept = keras.ops.convert_to_numpy(largest(features, k))
    np.testing.assert_array_equal(np.sort(kept), np.sort(largest_in_numpy(features, k)))
    assert ((kept == 0) | (kept == features)).all()
    assert ((kept > 0).sum(-1) == np.minimum(k, (features > 0).sum(-1))).all()


# What is refused


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("standard", {"architecture": "transcoder"}, "no transcoder.*Use `bs.Transcoder`"),
        ("standard", {"architecture": "batchtopk"}, "by `save_inference_model`"),
        ("standard", {"activation_fn_str": "tanh-relu"}, "Received 'standard of tanh-relu'"),
        ("gated", {"activation_fn_str": "topk", "k": 3}, "Received 'gated of topk'"),
        (
            "standard",
            {"normalize_activations": "expected_average_only_in"},
            "unscaled.*Fold the scale",
        ),
        ("standard", {"normalize_activations": True}, "unscaled. Received True. Fold the scale"),
        ("standard", {"normalize_activations": "covariance_whitening"}, "none, constant_norm_"),
        ("standard", {"reshape_activations": "hook_q"}, "`reshape_activations` none or hook_z"),
        ("standard", {"finetuning_scaling_factor": True}, r"scaling_factor \[latents\], and no"),
        ("topk", {"k": None}, "`k` from 1 to 24"),
        ("topk", {"k": LATENTS + 1}, "`k` from 1 to 24, the number of latents. Received 25"),
        ("topk", {"k": True}, "`k` from 1 to 24"),
        ("topk", {"d_in": SIZE - 1}, "`d_in` 32, the size of the arrays. Received 31"),
        ("gated", {"d_sae": 99}, "`d_sae` 24, the size of the arrays. Received 99"),
        ("standard", {"rescale_acts_by_decoder_norm": True}, "for topk alone. Received 'standard'"),
        ("topk", {"rescale_acts_by_decoder_norm": 1}, "norm` to be true or false. Received 1"),
        (
            "gated",
            {"apply_b_dec_to_input": "false"},
            "to be true or false. Received 'false'",
        ),
        ("standard", {"apply_b_dec_to_input": None}, "to be true or false. Received None"),
    ],
)
def test_settings_that_cannot_be_run(architecture, config, words, tmp_path, rng):
    path = save(tmp_path, arrays(rng, architecture), architecture, **config)
    with pytest.raises(bs.SurgeryError, match=words):
        read_autoencoder(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_arrays_that_do_not_fit(architecture, tmp_path, rng):
    w = arrays(rng, architecture)
    bias = BIASES[architecture][-1]
    wrong = {
        "missing": {name: array for name, array in w.items() if name != bias},
        "another": {**w, "W_skip": np.zeros((SIZE, SIZE), "float32")},
        "of another shape": {**w, bias: np.zeros(LATENTS + 1, "float32")},
        "turned": {**w, "W_enc": np.zeros((LATENTS, SIZE), "float32")},
        "NaN": {**w, bias: np.full(LATENTS, np.nan, "float32")},
        "too large": {**w, "b_dec": np.full(SIZE, 1e300)},
        "flat": {**w, "W_dec": np.zeros(LATENTS, "float32")},
        "a factor": {**w, "scaling_factor": np.full(LATENTS, 2, "float32")},
    }
    for name, tensors in wrong.items():
        words = {
            "a factor": "since there is a scaling_factor",
            "NaN": f"of finite numbers.*others in {bias}",
            "too large": "of finite numbers.*others in b_dec",
        }.get(name, r"W_dec \[latents, size\].*and no others\. Received")
        with pytest.raises(bs.SurgeryError, match=words):
            read_autoencoder(save(tmp_path, tensors, architecture))
    read_autoencoder(save(tmp_path, w, architecture))


def test_files_that_are_no_autoencoder_of_gemma_scope(tmp_path, rng):
    w = arrays(rng, "jumprelu")

    def refused(words, tensors=w):
        path = save_gemma_scope(tmp_path, tensors)
        with pytest.raises(bs.SurgeryError, match=words):
            read_autoencoder(path)

    refused(r"threshold \[latents\], and no", {n: a for n, a in w.items() if n != "threshold"})
    refused("and no others.*affine_skip", {**w, "affine_skip_connection": np.zeros((SIZE, SIZE))})
    refused("Object arrays cannot be loaded", {**w, "b_dec": np.array([{}] * SIZE)})
    hooks = {"hf_hook_point_in": "model.layers.1.mlp.input", "hf_hook_point_out": "another"}
    (tmp_path / "config.json").write_text(json.dumps(hooks))
    refused("an autoencoder, no transcoder")
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.npz").write_bytes(b"PK")
    with pytest.raises(bs.SurgeryError, match="expected an autoencoder with its settings"):
        read_autoencoder(tmp_path)
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as file:
        file.writestr("W_dec.npy", b"no array")
    with pytest.raises(bs.SurgeryError, match="expected an autoencoder with its settings"):
        read_autoencoder(tmp_path)


def test_a_folder_holds_one_autoencoder(tmp_path, rng):
    save_gemma_scope(tmp_path, arrays(rng, "jumprelu"))
    save(tmp_path, arrays(rng, "jumprelu"), "jumprelu")
    with pytest.raises(
        bs.SurgeryError, match=r"with sae_weights.safetensors and params.npz\. Pass"
    ):
        read_autoencoder(tmp_path)
    (tmp_path / "params.npz").unlink()
    (tmp_path / "cfg.json").unlink()
    with pytest.raises(bs.SurgeryError, match=r"settings beside it.*No such file"):
        read_autoencoder(tmp_path)
