"""Models of Hugging Face, as KerasHub's converters load them, checked for what these leave out.

A converter reads some settings of `config.json` and some tensors of the files, and passes over all
others. Here the backbone is given what it can have; what it cannot have is refused, and so are
weights that nothing has read. Seen in KerasHub 0.32 and `transformers` 5.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown

_SILU = {"hidden_act": ("silu", "swish")}
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_TIED, _UNTIED = {"tie_word_embeddings": (True,)}, {"tie_word_embeddings": (False,)}
_UNBIASED = {"attention_bias": (False,), "mlp_bias": (False,)}
_ALL_MIXTURES = {"mlp_only_layers": ([],), "decoder_sparse_step": (1,)}
_NO_WINDOW = {"use_sliding_window": (False,)}  # it has no effect in KerasHub
_GEMMA = {"hidden_activation": _GELU, "rms_norm_eps": (1e-6,), **_UNBIASED, **_TIED}

_SETTINGS: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": _GELU,
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        **_TIED,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "attn_logit_softcapping": ()},
    "gemma4_text": {"hidden_activation": _GELU},
    "gpt_oss": {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,), **_UNTIED},
    "llama": {**_SILU, **_UNBIASED},
    "mistral": {**_SILU, **_UNTIED},
    "mixtral": {**_SILU, **_UNTIED},
    "qwen2": {**_SILU, **_NO_WINDOW},
    "qwen2_moe": {**_SILU, **_UNTIED, **_ALL_MIXTURES, **_NO_WINDOW},
    "qwen3": {**_SILU, **_UNBIASED, **_NO_WINDOW},
    "qwen3_5_moe_text": _SILU,
    "qwen3_5_text": _SILU,
    "qwen3_moe": {**_SILU, **_UNBIASED, **_ALL_MIXTURES, **_NO_WINDOW},
    "smollm3": {**_SILU, **_UNBIASED, **_TIED, **_NO_WINDOW},
}
"""By model type, what a setting of `config.json` must be, if it is there and not null."""

_HEADS_SHARE_WIDTH = ("llama", "mixtral", "qwen2", "qwen2_moe")

_WITH_IMAGES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""The model type of the text, where a model takes images too."""

_FREQUENCIES = {
    "gpt_oss": ("yarn",),
    "llama": ("llama3",),
    "gemma3_text": ("linear",),
    "qwen3_5_text": ("mrope",),
    "qwen3_5_moe_text": ("mrope",),
}
"""The types of rotary frequencies that the converters know, beside the default."""

_YARN = {
    "beta_fast": (32.0,),
    "beta_slow": (1.0,),
    "original_max_position_embeddings": (4096,),
    "truncate": (False,),
}
"""Of GPT-OSS, where the backbone has no other."""

_WAVELENGTHS = {
    "gemma": {"": 1e4},
    "gemma2": {"": 1e4},
    "gemma3_text": {"": 1e6, "full_attention": 1e6, "sliding_attention": 1e4},
}
"""Of rotary positions, where the backbone has no other, by the type of block."""

_TURNED_IN_PART = ("qwen3_5_moe_text", "qwen3_5_text")
"""Model types that rotate a part of each head."""

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False},
    "mixtral": {"output_router_logits": False},
}
"""What `transformers` takes where a published `config.json` says nothing and converters stop."""

_NO_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$"  # made anew, not learned
    r"|(^|\.)(mtp|vision|visual|audio|embed_vision|embed_audio|multi_modal)"  # not of the text
)


def is_hugging_face(loader: Any) -> bool:
    """Whether a loader of KerasHub is for a causal LM of Hugging Face."""
    config = loader.config
    is_keras = "registered_name" in config or "model_type" not in config
    return not is_keras and _text_of(config)[0] in _SETTINGS


def convert(loader: Any, preset: str, load_weights: bool, **kwargs: Any) -> keras.Model:
    """Load a backbone by KerasHub's converter.

    Args:
        loader: KerasHub's loader of the folder or repository, see `is_hugging_face`.
        preset: what the user called it.
        load_weights: whether to load the weights.
        **kwargs: for the backbone.

    Raises:
        SurgeryError: the config has what KerasHub's backbone has not, the converter leaves out a
            tensor, or it stops.
    """
    whole = _filled(loader.config)
    kind, text = _text_of(whole)
    with _in_words(preset, kind):
        _check_adapter(preset, Path(loader.preset))
        _check_settings(preset, kind, text)
        _warn_of_windows(preset, kind, text)
        config, own = _respelled(kind, whole), _further(kind, text)
        found = loader.converter.convert_backbone_config(config)
        backbone = loader.check_backbone_class()(**{**found, **own, **kwargs})
    if load_weights:
        graph.jax_memory_cleanup(backbone)
        with _Files(loader.preset) as files, _in_words(preset, kind):
            loader.converter.convert_weights(backbone, files, config)
            _check_all_read(preset, kind, text, files.unread())
    return backbone


class _Files(graph.SafetensorLoader):
    """The tensors of a model, which remember what was read of them."""

    def __init__(self, preset: str) -> None:
        super().__init__(preset)
        self.read: set[str] = set()

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """Return the name of a tensor in the files, as upstream."""
        if ".vision_model." in hf_weight_key:  # `transformers` 5 saves names without it
            if not any(name.endswith(hf_weight_key) for name in dict_like.keys()):
                hf_weight_key = hf_weight_key.replace(".vision_model.", ".")
        name = super().get_prefixed_key(hf_weight_key, dict_like)
        self.read.add(name)
        return name

    def port_weight(
        self, keras_variable: Any, hf_weight_key: str, hook_fn: Callable | None = None
    ) -> None:
        """As upstream, but no hook rounds to float16, as those of Mistral do."""

        def hook(tensor: np.ndarray, shape: list[int]) -> np.ndarray:
            return np.asarray(hook_fn(tensor.view(_Unrounded), shape))  # type: ignore[misc]

        super().port_weight(keras_variable, hf_weight_key, hook_fn and hook)

    def unread(self) -> list[str]:
        """Return the names of the tensors that nothing has read."""
        if self.safetensor_config is None:
            names = {name for file in self.safetensor_files.values() for name in file.keys()}
        else:
            names = set(self.safetensor_config["weight_map"])
        return sorted(names - self.read)


class _Unrounded(np.ndarray):
    """An array that stays what it is where it is to become float16."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return self if dtype == np.float16 else super().astype(dtype, *args, **kwargs)


def _text_of(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model type and the settings of the part that reads text."""
    kind = config["model_type"]
    if kind not in _WITH_IMAGES:
        return kind, config
    return _WITH_IMAGES[kind], {**config, **(config.get("text_config") or {})}


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with what `transformers` takes for settings that are not there, or null."""
    kind = config["model_type"]
    if kind in _WITH_IMAGES and config.get("text_config"):
        text = {**config["text_config"], "model_type": _WITH_IMAGES[kind]}
        return {**config, "text_config": _filled(text)}
    taken = dict(_LEFT_OUT.get(kind, {}))
    if kind == "llama":
        taken["num_key_value_heads"] = config.get("num_attention_heads")
    by_default = (*taken, "rope_parameters")
    given = {k: x for k, x in config.items() if x is not None or k not in by_default}
    return {**taken, **given}


def _check_adapter(preset: str, folder: Path) -> None:
    """Refuse a folder with an adapter beside the weights, which `transformers` would load too."""
    if (folder / "adapter_config.json").is_file():
        raise SurgeryError(
            f"from_preset at '{preset}': expected a model without an adapter. Received "
            "`adapter_config.json` beside it. Merge it with `merge_and_unload` of PEFT and save "
            "the model; or remove the file, for the model without the adapter."
        )


def _check_settings(preset: str, kind: str, text: dict[str, Any]) -> None:
    """Refuse what KerasHub's backbone has not, or its converter does not give it."""
    known = [*_SETTINGS[kind].items(), *_computed(kind, text)]
    settings = [(name, text.get(name), accepted) for name, accepted in known]
    if kind != "gpt_oss":
        settings.append(("quantization_config", text.get("quantization_config"), ()))
    if kind != "gemma4_text":  # whose converter reads all of them
        settings += _rotary_settings(kind, text)
    for name, value, accepted in settings:
        if value is not None and value not in accepted:
            wanted = " or ".join(map(shown, accepted)) or "null"
            raise SurgeryError(
                f"from_preset at '{preset}': expected {wanted} as `{name}` in config.json, since "
                f"KerasHub computes a model of type '{kind}' as if it were so. Received "
                f"{shown(value)}. If that is what you want, load it with "
                "`keras_hub.models.Backbone.from_preset`, and make a `CachedCausalLM` of it."
            )


def _warn_of_windows(preset: str, kind: str, text: dict[str, Any]) -> None:
    """Say so where KerasHub has the windows of GPT-OSS on other blocks, as of all published."""
    window, number = text.get("sliding_window"), text.get("num_hidden_layers", 0)
    if kind != "gpt_oss" or window is None:
        return
    types = ["sliding_attention" if i % 2 else "full_attention" for i in range(number)]
    if text.get("layer_types") != types:
        warnings.warn(
            f"from_preset at '{preset}': KerasHub has windows of {window} tokens on every other "
            "block from the second on, and config.json on other blocks. Texts that are longer "
            "differ from those of `transformers`.",
            stacklevel=2,
        )


def _computed(kind: str, text: dict[str, Any]) -> Iterator[tuple[str, tuple]]:
    """Yield settings that must be what others make of them."""
    if kind in _HEADS_SHARE_WIDTH:
        yield "head_dim", (text["hidden_size"] // text["num_attention_heads"],)
    period = {"gemma2": 2, "gemma3_text": 6}.get(kind)
    if period is not None:
        blocks = range(1, text["num_hidden_layers"] + 1)
        types = ["sliding_attention" if i % period else "full_attention" for i in blocks]
        yield "layer_types", (types,)


def _rotary_settings(kind: str, text: dict[str, Any]) -> Iterator[tuple[str, Any, tuple]]:
    """Yield settings of rotary positions, what each is, and what it may be."""
    types = ("default", *_FREQUENCIES.get(kind, ()))
    for block, rotary in _rotary(text).items():
        yield "rope_type", rotary.get("rope_type"), types
        if kind not in _TURNED_IN_PART:
            yield "partial_rotary_factor", rotary.get("partial_rotary_factor"), (1.0,)
        if kind == "gpt_oss":
            yield from ((name, rotary.get(name), accepted) for name, accepted in _YARN.items())
        if kind in _WAVELENGTHS:
            yield "rope_theta", rotary.get("rope_theta"), (_WAVELENGTHS[kind].get(block),)


def _rotary(text: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of rotary positions, by the type of block where they differ.

    `transformers` 5 saves all as `rope_parameters`, earlier releases each beside the others.
    """
    given = text.get("rope_parameters") or {}
    by_block = {name: value for name, value in given.items() if isinstance(value, dict)}
    if by_block:
        return by_block
    scaling = dict(text.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
    whole = {"rope_theta": text.get("rope_theta"), **given, **scaling}
    if text.get("rope_local_base_freq") is None:
        return {"": whole}
    local = {"rope_theta": text["rope_local_base_freq"]}
    return {"full_attention": whole, "sliding_attention": local}


def _respelled(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with what `transformers` 5 saves under other names than converters read."""
    config = dict(config)
    if kind in ("gpt_oss", "llama"):
        rotary = _rotary(config)[""]
        scaled = rotary.get("rope_type") in _FREQUENCIES[kind]
        config["rope_scaling"] = rotary if scaled else None
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    return config


def _further(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of the backbone that the converter leaves at their defaults."""
    if kind == "llama" and text.get("rms_norm_eps") is not None:
        return {"layer_norm_epsilon": text["rms_norm_eps"]}
    if kind == "gpt2" and text.get("n_inner") is not None:
        return {"intermediate_dim": text["n_inner"]}
    if kind == "gpt_oss" and text.get("sliding_window") is not None:
        return {"sliding_window": text["sliding_window"] - 1}  # KerasHub's is one token wider
    return {}


def _check_all_read(preset: str, kind: str, text: dict[str, Any], unread: list[str]) -> None:
    """Refuse a file with weights that the converter left out; a head may be that of the table."""
    tied = text.get("tie_word_embeddings") or "tie_word_embeddings" in _SETTINGS[kind]
    left = [name for name in unread if not _NO_WEIGHTS.search(name)]
    if text.get("num_kv_shared_layers"):
        first = text["num_hidden_layers"] - text["num_kv_shared_layers"]
        left = [name for name in left if not _is_borrowed(name, first)]
    left = [name for name in left if not (tied and name.endswith("lm_head.weight"))]
    if left:
        raise SurgeryError(
            f"from_preset at '{preset}': expected a file whose weights KerasHub's converter of "
            f"'{kind}' reads all. Received {len(left)} tensors that it leaves out, such as "
            f"'{left[0]}'. Compare config.json with the original. If that is what you want, load "
            "it with `keras_hub.models.Backbone.from_preset`."
        )


def _is_borrowed(name: str, first: int) -> bool:
    """Whether a tensor makes keys or values of a block that takes those of an earlier one."""
    found = re.search(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    return found is not None and int(found[1]) >= first


@contextlib.contextmanager
def _in_words(preset: str, kind: str) -> Iterator[None]:
    """Say of what preset it is that a converter stops at."""
    try:
        yield
    except SurgeryError:
        raise
    except (
        AttributeError,
        FileNotFoundError,
        LookupError,
        TypeError,
        ValueError,
        safetensors.SafetensorError,
    ) as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected a config and `.safetensors` files that "
            f"KerasHub's converter of '{kind}' takes. Received others ({type(error).__name__}: "
            f"{str(error)[:200]}). Compare them with those of the original."
        ) from error
