"""Transcoders in NumPy, by their definitions, and files of them as programs save them."""

import json

import numpy as np
from safetensors.numpy import save_file

SIZE, LATENTS, K = 32, 24, 5
V6 = {
    "d_in": SIZE,
    "d_sae": LATENTS,
    "d_out": SIZE,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"hook_name": "blocks.1.hook_mlp_in", "hook_name_out": "blocks.1.hook_mlp_out"},
}
"""What SAELens 6 writes of every transcoder."""

SCOPE_2 = {
    "width": LATENTS,
    "architecture": "jump_relu",
    "affine_connection": True,
    "type": "transcoder",
}
"""What Gemma Scope 2 has beside its arrays."""


def arrays(rng, size=SIZE, latents=LATENTS, source=SIZE):
    """Return random arrays as they are multiplied: features of s are those of s @ W_enc + b_enc."""
    made = {
        "W_enc": 0.5 * rng.normal(size=(source, latents)),
        "b_enc": 0.3 * rng.normal(size=latents),
        "threshold": rng.uniform(0.2, 1, latents),
        "W_dec": rng.normal(size=(latents, size)) * rng.uniform(0.1, 1, (latents, 1)),
        "b_dec": 0.2 * rng.normal(size=size),
        "W_skip": 0.3 * rng.normal(size=(source, size)),
    }
    return {name: array.astype("float32") for name, array in made.items()}


def encode(s, w, kept="relu"):
    """Return the features of what a transcoder reads, in float64."""
    p = s.astype("float64") @ w["W_enc"].astype("float64") + w["b_enc"]
    features = np.maximum(p, 0)
    if kept == "jumprelu":
        return features * (p > w["threshold"])
    if kept == "topk":
        least = np.sort(features, axis=-1)[..., -K, None]
        return np.where(features >= least, features, 0)
    return features


def decode(s, features, w, skip=True):
    """Return the output of a transcoder in float64."""
    made = features @ w["W_dec"].astype("float64") + w["b_dec"]
    return made + s.astype("float64") @ w["W_skip"] if skip else made


def _pick(w, names):
    return {name: np.ascontiguousarray(w[name]) for name in names}


def save_saelens(folder, w, architecture, **config):
    """Save a folder as SAELens 6 does, but for what `config` says."""
    folder.mkdir(exist_ok=True)
    tensors = _pick(w, ["W_enc", "b_enc", "W_dec", "b_dec"])
    if "jumprelu" in architecture:
        tensors["threshold"] = w["threshold"]
    if "skip" in architecture:
        tensors["W_skip"] = np.ascontiguousarray(w["W_skip"].T)
    save_file(tensors, folder / "sae_weights.safetensors")
    sizes = {"d_in": len(w["W_enc"]), "d_sae": len(w["W_dec"]), "d_out": len(w["b_dec"])}
    document = {**V6, **sizes, "architecture": architecture, **config}
    (folder / "cfg.json").write_text(json.dumps(document))
    return str(folder)


def save_sparsify(folder, w, skip=True, **config):
    """Save a folder as sparsify does, named after the module."""
    folder = folder / "h.1.mlp"
    folder.mkdir(exist_ok=True)
    tensors = {
        "encoder.weight": np.ascontiguousarray(w["W_enc"].T),
        "encoder.bias": w["b_enc"],
        **_pick(w, ["W_dec", "b_dec"]),
        **({"W_skip": np.ascontiguousarray(w["W_skip"].T)} if skip else {}),
    }
    save_file(tensors, folder / "sae.safetensors")
    document = {"k": K, "d_in": len(w["W_enc"]), "transcode": True, "skip_connection": skip}
    (folder / "cfg.json").write_text(json.dumps({**document, **config}))
    return str(folder)


def save_gemma_scope(folder, w, layer=1):
    """Save a folder as Gemma Scope has it, which does not say the layer."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "params.npz", **_pick(w, ["W_enc", "b_enc", "threshold", "W_dec", "b_dec"]))
    return str(folder)


def save_gemma_scope_2(folder, w, layer=1, skip=True, **config):
    """Save a folder as Gemma Scope 2 has it."""
    folder.mkdir(exist_ok=True)
    names = {"W_enc": "w_enc", "W_dec": "w_dec"}
    tensors = {names.get(n, n): a for n, a in w.items() if n != "W_skip"}
    if skip:
        tensors["affine_skip_connection"] = w["W_skip"]
    save_file(tensors, folder / "params.safetensors")
    hooks = {
        f"hf_hook_point_{way}": f"model.layers.{layer}.{name}_feedforward_layernorm.output"
        for way, name in (("in", "pre"), ("out", "post"))
    }
    document = {**SCOPE_2, **hooks, "affine_connection": skip, **config}
    (folder / "config.json").write_text(json.dumps(document))
    return str(folder)


def save_circuit_tracer(folder, w, skip=True, **others):
    """Save a file as circuit-tracer has it, with other arrays beside its own."""
    folder.mkdir(exist_ok=True)
    tensors = {
        "W_enc": np.ascontiguousarray(w["W_enc"].T),
        **_pick(w, ["b_enc", "W_dec", "b_dec"]),
        **({"W_skip": np.ascontiguousarray(w["W_skip"].T)} if skip else {}),
        **others,
    }
    save_file(tensors, folder / "layer_1.safetensors")
    return str(folder / "layer_1.safetensors")
