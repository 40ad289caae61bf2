"""Files of sparse autoencoders, read into one form whichever program trained them.

Sources: the code of `sparsify` (https://github.com/EleutherAI/sparsify), of SAELens 3 to 6
(https://github.com/decoderesearch/SAELens), and the tutorials of Gemma Scope
(https://github.com/google-deepmind/gemma_penzai).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import STORABLE, as_path, read_arrays, read_json, reading
from backbone_surgery.numbers import is_int

_MOST = 2**20
"""Bytes of `cfg.json`."""

_SHAPES = {
    "W_enc": ("size", "latents"),
    "encoder.weight": ("latents", "size"),
    "W_dec": ("latents", "size"),
    "b_dec": ("size",),
}
"""The shapes of arrays by name; all others are [latents]."""

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
    if not path:
        raise SurgeryError(
            "SparseAutoencoder: expected the path of a folder, or `layers`. Received neither. Pass "
            "the folder of one layer."
        )
    folder = as_path(path, "SparseAutoencoder")
    readers = {
        "sae.safetensors": _read_sparsify,
        "sae_weights.safetensors": _read_saelens,
        "params.npz": _read_gemma_scope,
        "params.safetensors": _read_gemma_scope,
    }
    found = [folder / name for name in readers if (folder / name).is_file()]
    if folder.suffix == ".npz" and folder.is_file():
        found = [folder]
    if len(found) != 1:
        raise SurgeryError(
            f"SparseAutoencoder at '{path}': expected a folder with one of {', '.join(readers)}. "
            f"Received one with {' and '.join(f.name for f in found) or 'none of them'}. Pass the "
            "folder of one autoencoder."
        )
    read = readers.get(found[0].name, _read_gemma_scope)
    with reading(folder, "SparseAutoencoder", "an autoencoder with its settings beside it"):
        return read(found[0])


def _read_sparsify(file: Path) -> Autoencoder:
    config = dict(read_json(file.parent / "cfg.json", _MOST))
    unknown = {n: config[n] for n in ("signed", "transcode", "skip_connection") if config.get(n)}
    if unknown or config.get("activation", "topk") != "topk":
        received = unknown or config["activation"]
        raise _refused(file, "a top-k autoencoder, neither signed nor a transcoder", received)
    w = _checked(file, read_arrays(file), ("encoder.weight", "encoder.bias", "W_dec", "b_dec"))
    _check_sizes(file, config, w)
    k = _count(file, config.get("k"), w)
    center = w["b_dec"]
    return Autoencoder(w["encoder.weight"].T, w["encoder.bias"], center, w["W_dec"], center, k=k)


def _read_gemma_scope(file: Path) -> Autoencoder:
    """Read arrays without settings: JumpReLU of what is not centred. Gemma Scope 2 has `w_enc`."""
    config = file.parent / "config.json"
    hooks = dict(read_json(config, _MOST)) if config.is_file() else {}
    if hooks.get("hf_hook_point_out") not in (None, hooks.get("hf_hook_point_in")):
        raise _refused(file, "an autoencoder, no transcoder", hooks)
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            stored = dict(arrays)
    else:
        stored = read_arrays(file)
    stored = {n.replace("w_", "W_", 1) if n.startswith("w_") else n: a for n, a in stored.items()}
    w = _checked(file, stored, ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"))
    zeros, threshold = np.zeros_like(w["b_dec"]), w["threshold"]
    return Autoencoder(w["W_enc"], w["b_enc"], zeros, w["W_dec"], w["b_dec"], threshold)


def _read_saelens(file: Path) -> Autoencoder:
    """Read arrays by the settings beside them, and put into the weights what can stand there."""
    config = dict(read_json(file.parent / "cfg.json", _MOST))
    architecture = _architecture(file, config)
    normalize = _normalization(file, config)
    stored = read_arrays(file)
    factor = next((n for n in _FACTORS if n in stored), _FACTORS[0])
    scaled = _flag(file, config, "finetuning_scaling_factor", False)
    rescaled = _flag(file, config, "rescale_acts_by_decoder_norm", False)
    names = ("W_enc", *_SAELENS[architecture], "W_dec", "b_dec")
    w = _checked(file, stored, (*names, factor) if scaled or factor in stored else names)
    _check_sizes(file, config, w)
    if not scaled and not np.allclose(w.get(factor, 1), 1):
        raise _refused(file, f"`finetuning_scaling_factor`, since there is a {factor}", False)
    if rescaled and architecture != "topk":
        raise _refused(file, "`rescale_acts_by_decoder_norm` for topk alone", architecture)
    options = config.get("activation_fn_kwargs") or {}
    encoder, decoder, threshold, k = w["W_enc"], w["W_dec"], None, None
    bias = w["b_mag" if architecture == "gated" else "b_enc"]
    if scaled:
        decoder = decoder * w[factor][:, None]
    if architecture == "topk":
        k = _count(file, config.get("k", options.get("k")), w)
        if rescaled:
            norms = np.maximum(np.linalg.norm(decoder, axis=1), 1e-8)
            encoder, bias, decoder = encoder * norms, bias * norms, decoder / norms[:, None]
    elif architecture == "gated":
        # The gate is open where x @ W_enc > -b_gate: that is a threshold for the magnitude.
        gain = np.exp(w["r_mag"])
        encoder, threshold = encoder * gain, bias - gain * w["b_gate"]
    else:
        threshold = w.get("threshold", np.zeros_like(bias))
    centered = _flag(file, config, "apply_b_dec_to_input", True)
    center = w["b_dec"] if centered else np.zeros_like(w["b_dec"])
    return Autoencoder(encoder, bias, center, decoder, w["b_dec"], threshold, k, normalize)


def _architecture(file: Path, config: Mapping[str, Any]) -> str:
    """Return the architecture; before SAELens 6, top k is an activation of the standard one."""
    architecture = config.get("architecture", "standard")
    activation = config.get("activation_fn_str", config.get("activation_fn", "relu"))
    if (architecture, activation) == ("standard", "topk"):
        architecture = "topk"
    known = activation == "relu" or (architecture, activation) == ("topk", "topk")
    if architecture not in _SAELENS or not known:
        received = f"{architecture} of {activation}"
        advice = "Save one that is still trained by `save_inference_model`, or use another one."
        raise _refused(file, f"one of {', '.join(_SAELENS)}, of relu or topk", received, advice)
    shape = config.get("reshape_activations", "none")
    if shape not in ("none", "hook_z"):
        raise _refused(file, "`reshape_activations` none or hook_z", shape)
    return architecture


def _normalization(file: Path, config: Mapping[str, Any]) -> str:
    """Return how hidden states are normalised; SAELens once said so by a boolean."""
    how = config.get("normalize_activations") or "none"
    if how in (True, "expected_average_only_in"):
        advice = "Fold the scale in by SAELens' `fold_activation_norm_scaling_factor`, and save it."
        raise _refused(file, "weights for hidden states as they are, unscaled", how, advice)
    if how not in NORMALIZED:
        raise _refused(file, f"`normalize_activations` {', '.join(NORMALIZED)}", how)
    return how


def _flag(file: Path, config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a setting that is true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise _refused(file, f"`{name}` to be true or false", value)
    return value


def _check_sizes(file: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse settings of other sizes than those of the arrays."""
    for name, size in zip(("d_sae", "d_in"), arrays["W_dec"].shape, strict=True):
        if config.get(name) not in (None, size):
            raise _refused(file, f"`{name}` {size}, the size of the arrays", config[name])


def _count(file: Path, k: Any, arrays: Mapping[str, np.ndarray]) -> int:
    """Check how many features are kept."""
    latents = len(arrays["W_dec"])
    if not is_int(k) or not 0 < k <= latents:
        raise _refused(file, f"`k` from 1 to {latents}, the number of latents", k)
    return int(k)


def _checked(
    file: Path, stored: Mapping[str, np.ndarray], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return the named arrays as float32; others, shapes that differ and NaN are refused."""
    shapes = {name: list(array.shape) for name, array in stored.items()}
    latents, size = [*shapes.get("W_dec", []), 0, 0][:2]
    axes = {name: _SHAPES.get(name, ("latents",)) for name in names}
    sizes = {"latents": latents, "size": size}
    if shapes != {name: [sizes[axis] for axis in axes[name]] for name in axes}:
        wanted = ", ".join(f"{name} [{', '.join(axes[name])}]" for name in axes)
        advice = "Get the file again, or use another one."
        raise _refused(file, f"arrays {wanted}, and no others", shapes, advice)
    odd = {n: str(array.dtype) for n, array in stored.items() if array.dtype not in STORABLE}
    if odd:
        advice = "Save them as float32: `.npz` files do not keep bfloat16, and hold it as |V2."
        raise _refused(file, "arrays of integers or floats that NumPy knows", odd, advice)
    with np.errstate(over="ignore"):
        arrays = {name: np.asarray(stored[name], "float32") for name in axes}
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        advice = "Get the file again, or use another one."
        raise _refused(file, "arrays of finite numbers", f"others in {', '.join(wrong)}", advice)
    return arrays


def _refused(
    file: Path, expected: str, received: Any, advice: str = "Use another one."
) -> SurgeryError:
    return SurgeryError(
        f"SparseAutoencoder at '{file}': expected {expected}. Received {shown(received)}. {advice}"
    )
