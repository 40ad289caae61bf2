"""What `transformers` takes for settings that a `config.json` of Hugging Face leaves out.

Seen in `transformers` 5.24.
"""

from typing import Any

Config = dict[str, Any]

_WITH_IMAGES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""The model type of the text, where a model takes images too."""

YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""Of GPT-OSS: what `transformers` takes where a config says nothing of rotary positions."""

_EPSILON, _THETA = {"rms_norm_eps": 1e-6}, {"rope_theta": 1e4}
_WIDE = {"use_sliding_window": False, "sliding_window": 4096}
_BALANCE = {"decoder_sparse_step": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
_LEFT_OUT: dict[str, Config] = {
    "gemma2": {
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3n_text": {
        "activation_sparsity_pattern": None,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "laurel_rank": 64,
        "num_kv_shared_layers": 15,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "sliding_window": 512,
    },
    "falcon": {"alibi": False, "bias": False, "multi_query": True, "parallel_attn": True},
    "gemma4_text": {
        "global_head_dim": 512,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt2": {"resid_pdrop": 0.1},
    "gpt_oss": {"rope_theta": 150_000.0},
    "llama": {**_EPSILON, **_THETA, "tie_word_embeddings": False},
    "mistral": {**_EPSILON, **_THETA},
    "mixtral": {
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    "qwen2": {**_EPSILON, **_THETA, **_WIDE, "tie_word_embeddings": False},
    "qwen2_moe": {
        **_EPSILON,
        **_THETA,
        **_WIDE,
        **_BALANCE,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
    },
    "qwen3": {**_EPSILON, **_THETA, **_WIDE, "tie_word_embeddings": False},
    "qwen3_5_moe_text": {**_EPSILON, "linear_conv_kernel_dim": 4},
    "qwen3_5_text": {**_EPSILON, "linear_conv_kernel_dim": 4},
    "qwen3_moe": {**_EPSILON, **_THETA, **_BALANCE, "sliding_window": None},
    "smollm3": {
        **_EPSILON,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_theta": 2e6,
    },
}
"""What `transformers` takes where a published `config.json` says nothing and converters stop."""

_NULL_IS_NONE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
"""Settings of these for which null is no default, but means that there is none."""

_ALIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3")
"""Where no number of heads of keys is one for each head of queries."""


def text_of(config: Config) -> tuple[str, Config]:
    """Return the model type and the settings of the part that reads text."""
    kind = config["model_type"]
    if kind not in _WITH_IMAGES:
        return kind, config
    return _WITH_IMAGES[kind], {**config, **(config.get("text_config") or {})}


def filled(config: Config) -> Config:
    """Return a config with what `transformers` takes for settings that are not there, or null."""
    kind = config["model_type"]
    if kind in _WITH_IMAGES and config.get("text_config"):
        text = {**config["text_config"], "model_type": _WITH_IMAGES[kind]}
        tied = {"tie_word_embeddings": False} if kind.startswith("qwen") else {}
        return {**tied, **config, "text_config": filled(text)}
    taken = {**_LEFT_OUT.get(kind, {}), **_by_others(kind, config)}
    replaced = {*taken, "rope_parameters"} - {*_NULL_IS_NONE}
    given = {name: x for name, x in config.items() if x is not None or name not in replaced}
    return {**taken, **given, **_instead(kind, {**taken, **given})}


def _by_others(kind: str, config: Config) -> Config:
    """Return what `transformers` takes for settings that are left out, by what others are."""
    heads, number = config.get("num_attention_heads"), config.get("num_hidden_layers", 0)
    taken: Config = {}
    if kind == "gpt_oss":
        taken = {"layer_types": every(number, 2, "full_attention", "sliding_attention")}
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            taken["rope_scaling"] = {"rope_type": "yarn", **YARN}
        return taken
    if kind == "qwen3_moe" and heads:
        return {"head_dim": config["hidden_size"] // heads}
    if kind == "gemma3n_text":
        sparse = 10 if number > 10 else 0
        return {
            "layer_types": every(number, 5, "full_attention", "sliding_attention"),
            "activation_sparsity_pattern": sparse * [0.95] + (number - sparse) * [0.0],
        }
    if kind == "gemma4_text":
        types = every(number, 6, "full_attention", "sliding_attention")
        return {"layer_types": [*types[:-1], "full_attention"]}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        period = config.get("full_attention_interval") or 4
        return {"layer_types": every(number, period, "full_attention", "linear_attention")}
    if kind == "llama" or (kind in _ALIKE and "num_key_value_heads" in config):
        taken["num_key_value_heads"] = heads
    if kind == "smollm3":
        period = config.get("no_rope_layer_interval") or 4
        taken["no_rope_layers"] = every(number, period, 0, 1)
        taken["layer_types"] = ["full_attention"] * number
    return taken


def every(number: int, period: int, last: Any, others: Any) -> list[Any]:
    """Return one value for the last of each `period` blocks, and another one for the others."""
    return [others if i % period else last for i in range(1, number + 1)]


def _instead(kind: str, config: Config) -> Config:
    """Return what takes the place of settings that `transformers` 5 writes in another way."""
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        usual = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
        rotary = {name: config.get(name) or x for name, x in usual.items()}
        return {"rope_parameters": {**rotary, **(config.get("rope_parameters") or {})}}
    heads = wide_heads(config) if kind == "gemma4_text" else None
    if heads is None or config.get("per_layer_config") is None:
        return {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {"global_head_dim": None, **{names[name]: value for name, value in heads.items()}}


def wide_heads(text: Config) -> Config | None:
    """Return what `per_layer_config` says of the heads of all blocks that attend to all tokens.

    It is `None` where it says anything else.
    """
    blocks = {int(i): x for i, x in (text.get("per_layer_config") or {}).items() if x}
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    heads: Config = next(iter(blocks.values()), {})
    known = set(heads) <= {"head_dim", "num_key_value_heads"}
    alike = all(x == heads for x in blocks.values()) and (not blocks or sorted(blocks) == full)
    return heads if known and alike else None
