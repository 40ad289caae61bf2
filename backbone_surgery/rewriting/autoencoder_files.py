"""Files of sparse autoencoders, read into one form whichever program trained them.

Sources: the code of `sparsify` (https://github.com/EleutherAI/sparsify), of SAELens 3 to 6
(https://github.com/decoderesearch/SAELens), and the tutorials of Gemma Scope
(https://github.com/google-deepmind/gemma_penzai).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewriting.coder_files import CoderFile, read_coder

_AXES = {
    "W_enc": ("size", "latents"),
    "encoder.weight": ("latents", "size"),
    "W_dec": ("latents", "size"),
    "b_dec": ("size",),
}
"""The axes of arrays by name; all others are [latents]."""

_SAELENS = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
}
"""What SAELens saves of each architecture besides the two matrices and `b_dec`."""

_FACTORS = ("scaling_factor", "finetuning_scaling_factor")
"""Names of a factor by which features are decoded; some releases store ones without using it."""

NORMALIZED = ("none", "constant_norm_rescale", "layer_norm")
"""What may be done to hidden states before they are encoded, in SAELens' words."""


@dataclass(frozen=True)
class Autoencoder:
    """A sparse autoencoder as float32 arrays.

    Of hidden states x, normalised, p = (x - center) @ encoder + bias. The features are relu(p)
    where p is over the threshold, or the k largest of relu(p). Their reconstruction is
    features @ decoder + shift, with the normalisation undone.

    Attributes:
        encoder: [size, latents].
        bias: [latents].
        center: [size].
        decoder: [latents, size].
        shift: [size].
        threshold: [latents], or `None` for the k largest.
        k: how many features are kept, or `None` for the threshold.
        normalize: one of `NORMALIZED`.
    """

    encoder: np.ndarray
    bias: np.ndarray
    center: np.ndarray
    decoder: np.ndarray
    shift: np.ndarray
    threshold: np.ndarray | None = None
    k: int | None = None
    normalize: str = "none"


def read_autoencoder(path: Any) -> Autoencoder:
    """Read an autoencoder that `sparsify`, SAELens or Gemma Scope saved.

    Args:
        path: a folder, in which one of their files tells the format; or a file `.npz` of Gemma
            Scope's arrays.

    Raises:
        SurgeryError: files, arrays or settings that are missing or that cannot be run.
    """
    readers = {
        "sae.safetensors": _read_sparsify,
        "sae_weights.safetensors": _read_saelens,
        "params.npz": _read_gemma_scope,
        "params.safetensors": _read_gemma_scope,
    }
    others = {".npz": _read_gemma_scope}
    return read_coder(path, "SparseAutoencoder", "an autoencoder", readers, others)


def _read_sparsify(file: CoderFile) -> Autoencoder:
    config = file.settings("cfg.json")
    if config.get("transcode"):
        raise _is_transcoder(file, config)
    unknown = {n: config[n] for n in ("signed", "skip_connection") if config.get(n)}
    if unknown or config.get("activation", "topk") != "topk":
        received = unknown or config["activation"]
        raise file.refused("a top-k autoencoder, not signed", received)
    names = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")
    w = _checked(file, file.stored(), names)
    latents = _check_sizes(file, config, w)
    k = file.count(config.get("k"), latents)
    center = w["b_dec"]
    return Autoencoder(w["encoder.weight"].T, w["encoder.bias"], center, w["W_dec"], center, k=k)


def _read_gemma_scope(file: CoderFile) -> Autoencoder:
    """Read arrays without settings: JumpReLU of what is not centred."""
    hooks = file.settings("config.json", optional=True)
    if hooks.get("hf_hook_point_out") not in (None, hooks.get("hf_hook_point_in")):
        raise _is_transcoder(file, hooks)
    names = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")
    w = _checked(file, upper(file.stored()), names)
    zeros, threshold = np.zeros_like(w["b_dec"]), w["threshold"]
    return Autoencoder(w["W_enc"], w["b_enc"], zeros, w["W_dec"], w["b_dec"], threshold)


def upper(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays by Gemma Scope's names: those of Gemma Scope 2 have `w_enc` for `W_enc`."""
    return {n.replace("w_", "W_", 1) if n.startswith("w_") else n: a for n, a in stored.items()}


def hooks_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hooks in settings of SAELens, which has them in `metadata` since release 6."""
    both = {**config, **(config.get("metadata") or {})}
    return {
        name: both[name] for name in ("hook_name", "hook_name_out", "hf_hook_name") if name in both
    }


def _is_transcoder(file: CoderFile, settings: Mapping[str, Any]) -> SurgeryError:
    return file.refused("an autoencoder, no transcoder", settings, "Use `bs.Transcoder`.")


def _read_saelens(file: CoderFile) -> Autoencoder:
    """Read arrays by the settings beside them, and put into the weights what can stand there."""
    config = file.settings("cfg.json")
    hooks = hooks_of(config)
    if hooks.get("hook_name_out") not in (None, hooks.get("hook_name")):
        raise _is_transcoder(file, hooks)
    architecture = _architecture(file, config)
    normalize = _normalization(file, config)
    stored = file.stored()
    factor = next((n for n in _FACTORS if n in stored), _FACTORS[0])
    scaled = file.flag(config, "finetuning_scaling_factor", False)
    rescaled = file.flag(config, "rescale_acts_by_decoder_norm", False)
    names = ("W_enc", *_SAELENS[architecture], "W_dec", "b_dec")
    w = _checked(file, stored, (*names, factor) if scaled or factor in stored else names)
    latents = _check_sizes(file, config, w)
    if not scaled and not np.allclose(w.get(factor, 1), 1):
        raise file.refused(f"`finetuning_scaling_factor`, since there is a {factor}", False)
    if rescaled and architecture != "topk":
        raise file.refused("`rescale_acts_by_decoder_norm` for topk alone", architecture)
    options = config.get("activation_fn_kwargs") or {}
    encoder, decoder, threshold, k = w["W_enc"], w["W_dec"], None, None
    bias = w["b_mag" if architecture == "gated" else "b_enc"]
    if scaled:
        decoder = decoder * w[factor][:, None]
    if architecture == "topk":
        k = file.count(config.get("k", options.get("k")), latents)
        if rescaled:
            norms = np.maximum(np.linalg.norm(decoder, axis=1), 1e-8)
            encoder, bias, decoder = encoder * norms, bias * norms, decoder / norms[:, None]
    elif architecture == "gated":
        # The gate is open where x @ W_enc > -b_gate: that is a threshold for the magnitude.
        gain = np.exp(w["r_mag"])
        encoder, threshold = encoder * gain, bias - gain * w["b_gate"]
    else:
        threshold = w.get("threshold", np.zeros_like(bias))
    centered = file.flag(config, "apply_b_dec_to_input", True)
    center = w["b_dec"] if centered else np.zeros_like(w["b_dec"])
    return Autoencoder(encoder, bias, center, decoder, w["b_dec"], threshold, k, normalize)


def _architecture(file: CoderFile, config: Mapping[str, Any]) -> str:
    """Return the architecture; before SAELens 6, top k is an activation of the standard one."""
    architecture = config.get("architecture", "standard")
    activation = config.get("activation_fn_str", config.get("activation_fn", "relu"))
    if isinstance(architecture, str) and architecture.endswith("transcoder"):
        raise _is_transcoder(file, {"architecture": architecture})
    if (architecture, activation) == ("standard", "topk"):
        architecture = "topk"
    known = activation == "relu" or (architecture, activation) == ("topk", "topk")
    if architecture not in _SAELENS or not known:
        received = f"{architecture} of {activation}"
        advice = "Save one that is still trained by `save_inference_model`, or use another one."
        raise file.refused(f"one of {', '.join(_SAELENS)}, of relu or topk", received, advice)
    shape = config.get("reshape_activations", "none")
    if shape not in ("none", "hook_z"):
        raise file.refused("`reshape_activations` none or hook_z", shape)
    return architecture


def _normalization(file: CoderFile, config: Mapping[str, Any]) -> str:
    """Return how hidden states are normalised; SAELens once said so by a boolean."""
    how = config.get("normalize_activations") or "none"
    if how in (True, "expected_average_only_in"):
        advice = "Fold the scale in by SAELens' `fold_activation_norm_scaling_factor`, and save it."
        raise file.refused("weights for hidden states as they are, unscaled", how, advice)
    if how not in NORMALIZED:
        raise file.refused(f"`normalize_activations` {', '.join(NORMALIZED)}", how)
    return how


def _check_sizes(
    file: CoderFile, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> int:
    """Refuse settings of other sizes than those of the arrays; return the number of latents."""
    latents, size = arrays["W_dec"].shape
    file.check_sizes(config, {"d_sae": latents, "d_in": size})
    return latents


def _checked(
    file: CoderFile, stored: Mapping[str, np.ndarray], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return the named arrays as float32, and check their shapes."""
    return file.checked(stored, {name: _AXES.get(name, ("latents",)) for name in names})
