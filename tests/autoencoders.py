"""Sparse autoencoders in NumPy, by their definitions, and folders of them as programs save them."""

import json

import numpy as np
from safetensors.numpy import save_file

SIZE, LATENTS, K = 32, 24, 5
ARCHITECTURES = ("standard", "jumprelu", "gated", "topk")
BIASES = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "topk": ("b_enc",),
}
V6 = {
    "d_in": SIZE,
    "d_sae": LATENTS,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"sae_lens_version": "6.54.12", "hook_name": "blocks.1.hook_resid_post"},
}
"""What SAELens 6 writes of every architecture."""


def arrays(rng, architecture, size=SIZE, latents=LATENTS):
    """Return random arrays by the names of SAELens; the decoder has rows of different lengths."""
    made = {name: 0.3 * rng.normal(size=latents) for name in BIASES[architecture]}
    if "threshold" in made:
        made["threshold"] = np.abs(made["threshold"]) + 0.5
    made["W_enc"] = 0.5 * rng.normal(size=(size, latents))
    made["W_dec"] = rng.normal(size=(latents, size)) * rng.uniform(0.1, 1, (latents, 1))
    made["b_dec"] = 0.2 * rng.normal(size=size)
    return {name: array.astype("float32") for name, array in made.items()}


def save(folder, tensors, architecture, /, **config):
    """Save a folder as SAELens 6 does, but for what `config` says."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    k = {"k": K} if architecture == "topk" else {}
    sizes = dict(zip(("d_sae", "d_in"), tensors["W_dec"].shape, strict=False))
    document = {**V6, **sizes, "architecture": architecture, **k, **config}
    (folder / "cfg.json").write_text(json.dumps(document))
    return str(folder)


def save_gemma_scope(folder, tensors):
    """Save a folder as Gemma Scope has it."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "params.npz", **tensors)
    return str(folder)


def largest(values, k):
    """Keep the k largest of the last axis, the first ones where some are equal."""
    kept = np.zeros_like(values)
    best = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    np.put_along_axis(kept, best, np.take_along_axis(values, best, -1), -1)
    return kept


def normal(x, how):
    """Return normalised hidden states, and the way back."""
    if how == "constant_norm_rescale":
        factor = np.sqrt(x.shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)
        return x * factor, lambda y: y / factor
    if how == "layer_norm":
        mean, std = x.mean(-1, keepdims=True), x.std(-1, ddof=1, keepdims=True)
        return (x - mean) / (std + 1e-5), lambda y: y * std + mean
    return x, lambda y: y


def encode(x, w, architecture, normalize="none", centered=True, rescaled=False):
    """Return the features of hidden states in float64."""
    w = {name: array.astype("float64") for name, array in w.items()}
    inner = (normal(x.astype("float64"), normalize)[0] - centered * w["b_dec"]) @ w["W_enc"]
    if architecture == "gated":
        gate = inner + w["b_gate"] > 0
        return gate * np.maximum(inner * np.exp(w["r_mag"]) + w["b_mag"], 0)
    inner = inner + w["b_enc"]
    if rescaled:
        inner = inner * np.linalg.norm(w["W_dec"], axis=1)
    if architecture == "topk":
        return largest(np.maximum(inner, 0), K)
    return np.maximum(inner, 0) * (inner > w.get("threshold", 0))


def decode(x, features, w, normalize="none", rescaled=False, factor=1.0):
    """Return the reconstruction of hidden states in float64."""
    lengths = np.linalg.norm(w["W_dec"].astype("float64"), axis=1) if rescaled else 1.0
    made = (features * factor / lengths) @ w["W_dec"].astype("float64") + w["b_dec"]
    return normal(x.astype("float64"), normalize)[1](made)
