"""Settings of Hugging Face's `config.json`: what KerasHub's backbones have, and what they have not.

What a config leaves out is what `transformers` takes. What a converter passes over is refused,
unless the backbone computes as if it were so. Seen in KerasHub 0.32 and `transformers` 5.24.
"""

import math
from collections.abc import Iterator
from typing import Any

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.families.as_in_hugging_face import rotated_share
from backbone_surgery.hugging_face.defaults import YARN, Config, every, wide_heads

_SILU = {"hidden_act": ("silu", "swish")}
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_TIED, _UNTIED = {"tie_word_embeddings": (True,)}, {"tie_word_embeddings": (False,)}
_UNBIASED = {"attention_bias": (False,), "mlp_bias": (False,)}
_ALL_MIXTURES = {"mlp_only_layers": ([],), "decoder_sparse_step": (1,)}
_NO_WINDOW = {"use_sliding_window": (False,)}  # it has no effect in KerasHub
_GEMMA = {"rms_norm_eps": (1e-6,), **_UNBIASED, **_TIED}

SETTINGS: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": _GELU,
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        **_TIED,
    },
    "gemma": {**_GEMMA, "hidden_act": (*_GELU, "gelu")},  # `transformers` takes "gelu" for tanh's
    "gemma2": {**_GEMMA, "hidden_activation": _GELU},
    "gemma3_text": {
        **_GEMMA,
        "hidden_activation": _GELU,
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
        "use_query_key_norm": (True,),
    },
    "gemma3n_text": {
        "hidden_activation": _GELU,
        "attention_bias": (False,),
        "use_bidirectional_attention": (False,),
        **_TIED,
    },
    "gemma4_text": {
        "hidden_activation": _GELU,
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": ("vision", False),
    },
    "bloom": {"apply_residual_connection_post_layernorm": (False,), **_TIED},
    "falcon": {
        "alibi": (True,),
        "bias": (True,),
        "new_decoder_architecture": (False,),
        "multi_query": (False,),
        "parallel_attn": (False,),
        "activation": ("gelu",),
        "layer_norm_epsilon": (1e-5,),
        **_TIED,
    },
    "gpt_neox": {
        "hidden_act": ("gelu", *_GELU),
        "use_parallel_residual": (True,),
        "attention_bias": (True,),
    },
    "opt": {
        "activation_function": ("relu",),
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
        **_TIED,
    },
    "gpt_oss": {
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "attention_bias": (True,),
        **_UNTIED,
    },
    "llama": {**_SILU, **_UNBIASED},
    "mistral": {**_SILU, **_UNTIED},
    "mixtral": {**_SILU, **_UNTIED},
    "phi3": _SILU,
    "qwen2": {**_SILU, **_NO_WINDOW},
    "qwen2_moe": {**_SILU, **_UNTIED, **_ALL_MIXTURES, **_NO_WINDOW, "qkv_bias": (True,)},
    # The norms of queries and keys have an epsilon of 1e-5 in KerasHub, and of 1e-6 in mixtures.
    "qwen3": {**_SILU, **_UNBIASED, **_NO_WINDOW, "rms_norm_eps": (1e-6, 1e-5)},
    "qwen3_5_moe_text": _SILU,
    "qwen3_5_text": _SILU,
    "qwen3_moe": {
        **_SILU,
        **_UNBIASED,
        **_ALL_MIXTURES,
        **_NO_WINDOW,
        "rms_norm_eps": (1e-6,),
    },
    "smollm3": {**_SILU, **_UNBIASED, **_TIED, **_NO_WINDOW},
}
"""By model type, what a setting of `config.json` must be, if it is there and not null."""

_HEADS_SHARE_WIDTH = ("llama", "mixtral", "phi3", "qwen2", "qwen2_moe", "smollm3")

_FREQUENCIES = {
    "gpt_oss": ("yarn",),
    "llama": ("llama3",),
    "gemma3_text": ("linear",),
    "phi3": ("longrope", "su", "yarn"),  # other names of early configs for the first
    "qwen3_5_text": ("mrope",),
    "qwen3_5_moe_text": ("mrope",),
}
"""The types of rotary frequencies that the converters know, beside the default."""

_WAVELENGTHS = {
    "gemma": {"": 1e4},
    "gemma2": {"": 1e4},
    "gemma3_text": {"": 1e6, "full_attention": 1e6, "sliding_attention": 1e4},
}
"""Of rotary positions, where the backbone has no other, by the type of block."""

_TURNED_IN_PART = ("gemma4_text", "gpt_neox", "phi3", "qwen3_5_moe_text", "qwen3_5_text")
"""Model types that rotate a part of each head, in some blocks."""

_PERIODS = {"gemma2": 2, "gemma3_text": 6}
"""Of how many blocks the last attends to all tokens."""


_NO_OTHER = "Use a model that has it so."
_AS_KERAS_HUB = (
    "If that is what you want, load it with `keras_hub.models.Backbone.from_preset`, and make a "
    "`CachedCausalLM` of it."
)


def check_settings(preset: str, kind: str, text: Config, is_ours: bool) -> None:
    """Refuse what KerasHub's backbone has not, or its converter does not give it."""
    known = [*SETTINGS[kind].items(), *_computed(kind, text)]
    settings = [(name, text.get(name), accepted) for name, accepted in known]
    quantised = text.get("quantization_config")
    if kind != "gpt_oss":
        settings.append(("quantization_config", quantised, ()))
    elif quantised is not None:
        settings.append(("quant_method", quantised.get("quant_method", "none"), ("mxfp4",)))
    for name, value, accepted in [*settings, *_rotary_settings(kind, text)]:
        if value is not None and value not in accepted:
            wanted = " or ".join(map(shown, accepted)) or "null"
            raise SurgeryError(
                f"from_preset at '{preset}': expected {wanted} as `{name}` in config.json, since "
                f"KerasHub computes a model of type '{kind}' as if it were so. Received "
                f"{shown(value)}. {_NO_OTHER if is_ours else _AS_KERAS_HUB}"
            )


def _computed(kind: str, text: Config) -> Iterator[tuple[str, tuple]]:
    """Yield settings that must be what others make of them."""
    number = text.get("num_hidden_layers", 0)
    if kind in _HEADS_SHARE_WIDTH:
        yield "head_dim", (text["hidden_size"] // text["num_attention_heads"],)
    if kind in _PERIODS:
        period = _PERIODS[kind]
        yield "layer_types", (every(number, period, "full_attention", "sliding_attention"),)
        if text.get("layer_types") is None:  # else it counts for nothing
            yield "sliding_window_pattern", (period,)
        widths = (text["head_dim"], text["hidden_size"] // text.get("num_attention_heads", 8))
        yield "query_pre_attn_scalar", widths
    if kind == "gpt_oss" and text.get("sliding_window") in (0, 1):
        yield "sliding_window", ()  # one token less, which KerasHub takes for none
    if kind in ("mistral", "smollm3"):
        is_windowed = kind == "mistral" and text.get("sliding_window") is not None
        yield "layer_types", ([f"{'sliding' if is_windowed else 'full'}_attention"] * number,)
    if kind == "opt":
        yield "word_embed_proj_dim", (text["hidden_size"],)
    if kind == "gemma4_text" and wide_heads(text) is None:
        yield "per_layer_config", ()


def _rotary_settings(kind: str, text: Config) -> Iterator[tuple[str, Any, tuple]]:
    """Yield settings of rotary positions, what each is, and what it may be."""
    for block, rotary in rotary_of(text).items():
        types = ("default", *_FREQUENCIES.get(kind, ()))
        if kind == "gemma4_text" and block != "sliding_attention":
            types = ("proportional",)
        yield "rope_type", rotary.get("rope_type"), types
        if kind not in _TURNED_IN_PART:
            yield "partial_rotary_factor", rotary.get("partial_rotary_factor"), (1.0,)
        if kind.startswith("gemma") and rotary.get("rope_type") != "linear":
            yield "factor", rotary.get("factor"), (1.0,)
        if kind == "phi3":
            yield from _of_phi3(rotary, text)
        if kind == "gpt_oss" and rotary.get("rope_type") == "yarn":
            yield from _yarn(rotary, text)
        if kind in _WAVELENGTHS:
            yield "rope_theta", rotary.get("rope_theta"), (_WAVELENGTHS[kind].get(block),)


def _of_phi3(rotary: Config, text: Config) -> Iterator[tuple[str, Any, tuple]]:
    """Yield what KerasHub makes of the two lengths of Phi-3, and `transformers` perhaps not."""
    part = rotated_share(text)
    size = text["hidden_size"] // text["num_attention_heads"]
    if int(size * part) % 2:
        yield "partial_rotary_factor", part, (2 * (int(size * part) // 2) / size,)
    if rotary.get("rope_type", "default") == "default":
        return
    first = rotary["original_max_position_embeddings"]
    factor = text["max_position_embeddings"] / first
    yield "factor", rotary.get("factor"), (factor,)
    usual = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
    given = rotary.get("attention_factor")
    if given is not None and not math.isclose(given, usual, rel_tol=1e-6):
        yield "attention_factor", given, (usual,)


def _yarn(rotary: Config, text: Config) -> Iterator[tuple[str, Any, tuple]]:
    """Yield what `transformers` makes of the settings of YaRN, and what KerasHub's are."""
    absent: Config = {**YARN, "truncate": True}
    absent["original_max_position_embeddings"] = text.get("max_position_embeddings")
    for name, wanted in YARN.items():
        if name != "factor":
            given = rotary.get(name)
            yield name, absent[name] if given is None else given, (wanted,)
    factor = rotary.get("factor") or YARN["factor"]
    yield "attention_factor", rotary.get("attention_factor"), (0.1 * math.log(factor) + 1,)
    for name in ("mscale", "mscale_all_dim"):
        yield name, rotary.get(name), ()


def rotary_of(text: Config) -> dict[str, Config]:
    """Return the parameters of rotary positions, by the type of block where they differ.

    `transformers` 5 saves all as `rope_parameters`, earlier releases each beside the others. Where
    there are `rope_scaling` too, the others count for nothing.
    """
    given = {} if text.get("rope_scaling") else text.get("rope_parameters") or {}
    by_block = {name: value for name, value in given.items() if isinstance(value, dict)}
    if by_block:
        return by_block
    scaling = dict(text.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
    whole = {"rope_theta": text.get("rope_theta"), **given, **scaling}
    name = "original_max_position_embeddings"
    if text.get(name) is not None:  # it goes before that among the others
        whole[name] = text[name]
    if text.get("rope_local_base_freq") is None:
        return {"": whole}
    local = {"rope_theta": text["rope_local_base_freq"]}
    return {"full_attention": whole, "sliding_attention": local}


def respelled(kind: str, config: Config) -> Config:
    """Return a config with what `transformers` 5 saves under other names than converters read."""
    config = dict(config)
    if kind in ("gpt_oss", "llama"):
        rotary = rotary_of(config)[""]
        scaled = rotary.get("rope_type") in _FREQUENCIES[kind]
        most = {"original_max_position_embeddings": config.get("max_position_embeddings")}
        config["rope_scaling"] = {**most, **rotary} if scaled else None
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    return config


def further(kind: str, text: Config) -> Config:
    """Return arguments of the backbone that the converter leaves at their defaults."""
    if kind == "llama" and text.get("rms_norm_eps") is not None:
        return {"layer_norm_epsilon": text["rms_norm_eps"]}
    if kind == "gpt2" and text.get("n_inner") is not None:
        return {"intermediate_dim": text["n_inner"]}
    if kind == "gpt_oss" and text.get("sliding_window") is not None:
        return {"sliding_window": text["sliding_window"] - 1}  # KerasHub's is one token wider
    return {}


def is_tied(kind: str, text: Config) -> bool:
    """Whether the head of a model is its table of tokens."""
    by_default = SETTINGS[kind].get("tie_word_embeddings") == (True,)
    return bool(text.get("tie_word_embeddings", by_default))
