"""Files of transcoders, read into one form whichever program trained them.

Sources: the code of `sparsify` (https://github.com/EleutherAI/sparsify), of SAELens 6
(https://github.com/decoderesearch/SAELens) and of circuit-tracer
(https://github.com/decoderesearch/circuit-tracer); of Gemma Scope its paper (arXiv:2408.05147,
page 18), and of Gemma Scope 2 the tutorial.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewriting.autoencoder_files import Autoencoder, hooks_of, upper
from backbone_surgery.rewriting.coder_files import CoderFile, read_coder

RESIDUAL, MLP_INPUT = "residual_mid", "mlp_norm"
"""Roles of the sites that transcoders of MLPs read."""

_AXES = {
    "W_enc": ("source size", "latents"),
    "b_enc": ("latents",),
    "threshold": ("latents",),
    "W_dec": ("latents", "size"),
    "b_dec": ("size",),
}

_OPTIONAL = ("threshold", "W_skip")
"""Arrays that circuit-tracer saves of some transcoders."""

_SAELENS = {
    "transcoder": (),
    "skip_transcoder": ("W_skip",),
    "jumprelu_transcoder": ("threshold",),
    "jumprelu_skip_transcoder": ("threshold", "W_skip"),
}
"""What SAELens saves of each architecture besides the two matrices and biases."""


@dataclass(frozen=True)
class TranscoderFiles:
    """A transcoder as float32 arrays, and what it reads.

    Attributes:
        coder: encoder [source size, latents] and decoder [latents, size], with their biases. Its
            center is zero.
        skip: [source size, size], what is added of the source itself; or `None`.
        source: role of the site of the same block that it reads; `None` where no file says so.
        norm: what is done to the source first, see `Transcoder`.
        layer: the number of the layer that it was trained on, where a file says so.
        of_module: whether it makes the output of the MLP's module itself, before a norm that may
            follow.
    """

    coder: Autoencoder
    skip: np.ndarray | None
    source: str | None
    norm: str | None = None
    layer: int | None = None
    of_module: bool = False


def read_transcoder(path: Any) -> TranscoderFiles:
    """Read a transcoder that `sparsify`, SAELens, circuit-tracer or Gemma Scope saved.

    Args:
        path: a folder, in which one of their files tells the format; a file `.npz` of Gemma Scope's
            arrays; or a file `.safetensors` of circuit-tracer.

    Raises:
        SurgeryError: files, arrays or settings that are missing or that cannot be run.
    """
    readers = {
        "sae.safetensors": _read_sparsify,
        "sae_weights.safetensors": _read_saelens,
        "params.npz": _read_gemma_scope,
        "params.safetensors": _read_gemma_scope_2,
    }
    others = {".npz": _read_gemma_scope, ".safetensors": _read_circuit_tracer}
    return read_coder(path, "Transcoder", "a transcoder", readers, others)


def _read_sparsify(file: CoderFile) -> TranscoderFiles:
    """Read what was trained on input and output of a module, which the folder is named after."""
    config = file.settings("cfg.json")
    if not file.flag(config, "transcode", False):
        raise _is_autoencoder(file, config)
    if config.get("activation", "topk") != "topk" or config.get("signed"):
        raise file.refused("a top-k transcoder that is not signed", config)
    axes = {
        "encoder.weight": ("latents", "source size"),
        "encoder.bias": ("latents",),
        **{name: _AXES[name] for name in ("W_dec", "b_dec")},
    }
    has_skip = file.flag(config, "skip_connection", False)
    skip = {"W_skip": ("size", "source size")} if has_skip else {}
    w = file.checked(file.stored(), {**axes, **skip})
    file.check_sizes(config, {"d_in": len(w["encoder.weight"].T)})
    k = file.count(config.get("k"), len(w["W_dec"]))
    module = file.path.parent.name
    is_mlp = module.split(".")[-1] == "mlp"
    made = _made(w, w["encoder.weight"].T, w["encoder.bias"], _transposed(w), k=k)
    source = MLP_INPUT if is_mlp else None
    return replace(made, source=source, layer=_number_in(module), of_module=is_mlp)


def _read_saelens(file: CoderFile) -> TranscoderFiles:
    config = file.settings("cfg.json")
    architecture = config.get("architecture", "standard")
    if architecture not in _SAELENS:
        if str(architecture) in ("standard", "gated", "jumprelu", "topk"):
            raise _is_autoencoder(file, config)
        raise file.refused(f"`architecture` {', '.join(_SAELENS)}", architecture)
    for name, right in {
        "activation_fn": "relu",
        "activation_fn_str": "relu",
        "normalize_activations": "none",
        "reshape_activations": "none",
    }.items():
        if config.get(name) not in (None, right):
            raise file.refused(f"`{name}` {right}, as for a transcoder", config[name])
    names = ("W_enc", "b_enc", "W_dec", "b_dec", *_SAELENS[architecture])
    axes = {**_AXES, "W_skip": ("size", "source size")}
    w = file.checked(file.stored(), {name: axes[name] for name in names})
    latents, size = w["W_dec"].shape
    file.check_sizes(config, {"d_sae": latents, "d_in": len(w["W_enc"]), "d_out": size})
    hooks = hooks_of(config)
    return replace(
        _made(w, w["W_enc"], w["b_enc"], _transposed(w)),
        source=_source_of(hooks),
        layer=_number_in(hooks.get("hook_name")),
        of_module=str(hooks.get("hook_name_out")).endswith(".mlp.hook_out"),
    )


def _number_in(name: Any) -> int | None:
    """Return the number of the layer in the name of a hook, a module or a file."""
    found = re.search(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)\.|^layer_(\d+)$", str(name))
    return int(found[1] or found[2]) if found else None


def _source_of(hooks: Mapping[str, Any]) -> str | None:
    """Return the role of the site that hooks of SAELens or Gemma Scope 2 name, if it is sure.

    TransformerLens has `ln2.hook_normalized` before the norm's gain, SAELens' settings of Gemma
    Scope 2 have it after: the hook of Hugging Face tells.
    """
    if str(hooks.get("hf_hook_name")).endswith(".pre_feedforward_layernorm.output"):
        return MLP_INPUT
    name = str(hooks.get("hook_name")).split(".", 2)[-1]
    roles = {"hook_resid_mid": RESIDUAL, "hook_mlp_in": RESIDUAL, "mlp.hook_in": MLP_INPUT}
    return roles.get(name)


def _read_gemma_scope(file: CoderFile) -> TranscoderFiles:
    """Read arrays without settings: JumpReLU of the MLP's input before the norm's gain."""
    names = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")
    w = file.checked(file.stored(), {name: _AXES[name] for name in names})
    return replace(_made(w, w["W_enc"], w["b_enc"]), source=RESIDUAL, norm="rms")


def _read_gemma_scope_2(file: CoderFile) -> TranscoderFiles:
    """Read arrays by the settings beside them; the skip connection is not transposed."""
    config = file.settings("config.json", optional=True)
    hook = config.get("hf_hook_point_in")
    if hook is not None and hook == config.get("hf_hook_point_out"):
        raise _is_autoencoder(file, config)
    stored = {n.replace("affine_skip_connection", "W_skip"): a for n, a in file.stored().items()}
    skip = {"W_skip": ("source size", "size")} if "W_skip" in stored else {}
    w = file.checked(upper(stored), {**_AXES, **skip})
    if file.flag(config, "affine_connection", "W_skip" in w) != ("W_skip" in w):
        raise file.refused("`affine_connection` as the arrays have it", config)
    made = _made(w, w["W_enc"], w["b_enc"], w.get("W_skip"))
    return replace(made, source=_source_of({"hf_hook_name": hook}), layer=_number_in(hook))


def _read_circuit_tracer(file: CoderFile) -> TranscoderFiles:
    """Read arrays without settings: JumpReLU, or ReLU; the encoder is transposed."""
    stored = {n.removeprefix("activation_function."): a for n, a in file.stored().items()}
    if "k" in stored:
        raise file.refused("a transcoder of ReLU or JumpReLU", "one of top k that keeps signs")
    axes = {**_AXES, "W_enc": ("latents", "source size"), "W_skip": ("size", "source size")}
    axes = {name: own for name, own in axes.items() if name in stored or name not in _OPTIONAL}
    w = file.checked(stored, axes)
    return replace(
        _made(w, w["W_enc"].T, w["b_enc"], _transposed(w)), layer=_number_in(file.path.stem)
    )


def _transposed(w: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the skip connection as [source size, size], where it is stored the other way."""
    return w["W_skip"].T if "W_skip" in w else None


def _made(
    w: Mapping[str, np.ndarray],
    encoder: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray | None = None,
    k: int | None = None,
) -> TranscoderFiles:
    """Put arrays together; without `k`, features over a threshold, or over zero, are kept."""
    threshold = w.get("threshold", np.zeros_like(bias)) if k is None else None
    center = np.zeros(len(encoder), "float32")
    coder = Autoencoder(encoder, bias, center, w["W_dec"], w["b_dec"], threshold, k)
    return TranscoderFiles(coder, skip, None)


def _is_autoencoder(file: CoderFile, config: Mapping[str, Any]) -> SurgeryError:
    return file.refused("a transcoder, no autoencoder", config, "Use `bs.SparseAutoencoder`.")
