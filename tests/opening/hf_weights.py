"""Backbones of the families that KerasHub does not convert, with weights of `transformers`.

Weights are copied by name: `NAMES` says which layer of `transformers` is which of KerasHub.
"""

import json
import re

import keras_hub
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "opt": {
        "embeddings/token_embedding": "model.decoder.embed_tokens",
        "embeddings/position_embedding": "model.decoder.embed_positions",
        "layer_norm": "model.decoder.final_layer_norm",
        "transformer_layer": "model.decoder.layers",
        "self_attention/query": "self_attn.q_proj",
        "self_attention/key": "self_attn.k_proj",
        "self_attention/value": "self_attn.v_proj",
        "self_attention/attention_output": "self_attn.out_proj",
        "self_attention_layer_norm": "self_attn_layer_norm",
        "feedforward_intermediate_dense": "fc1",
        "feedforward_output_dense": "fc2",
        "feedforward_layer_norm": "final_layer_norm",
    },
    "phi3": {
        "token_embedding/reverse_embeddings": "lm_head",
        "token_embedding": "model.embed_tokens",
        "sequence_output_layernorm": "model.norm",
        "transformer_layer": "model.layers",
        "attention/query": "self_attn.query",
        "attention/key": "self_attn.key",
        "attention/value": "self_attn.value",
        "attention/attention_output": "self_attn.o_proj",
        "pre_attention_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "feedforward_gate_dense": "mlp.gate",
        "feedforward_intermediate_dense": "mlp.up",
        "feedforward_output_dense": "mlp.down_proj",
    },
    "gpt_neox": {
        "token_embedding": "gpt_neox.embed_in",
        "layer_norm": "gpt_neox.final_layer_norm",
        "transformer_layer": "gpt_neox.layers",
        "self_attention/query_key_value": "attention.query_key_value",
        "self_attention/attention_output": "attention.dense",
        "self_attention_layer_norm": "input_layernorm",
        "feedforward_intermediate_dense": "mlp.dense_h_to_4h",
        "feedforward_output_dense": "mlp.dense_4h_to_h",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    "bloom": {
        "token_embedding": "transformer.word_embeddings",
        "embedding_layernorm": "transformer.word_embeddings_layernorm",
        "final_layernorm": "transformer.ln_f",
        "transformer_layer": "transformer.h",
        "self_attention/query_dense": "self_attention.query",
        "self_attention/key_dense": "self_attention.key",
        "self_attention/value_dense": "self_attention.value",
        "self_attention/output_dense": "self_attention.dense",
        "pre_attention_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp_intermediate_dense": "mlp.dense_h_to_4h",
        "mlp_output_dense": "mlp.dense_4h_to_h",
    },
    "falcon": {
        "token_embedding": "transformer.word_embeddings",
        "final_layernorm": "transformer.ln_f",
        "transformer_layer": "transformer.h",
        "attention/query_dense": "self_attention.query",
        "attention/key_dense": "self_attention.key",
        "attention/value_dense": "self_attention.value",
        "attention/output_dense": "self_attention.dense",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "dense_h_to_4h": "mlp.dense_h_to_4h",
        "dense_4h_to_h": "mlp.dense_4h_to_h",
    },
    "gemma3n_text": {
        "embed_tokens/embedding": "model.embed_tokens",
        "embed_tokens_per_layer/embedding": "model.embed_tokens_per_layer",
        "per_layer_model_projection": "model.per_layer_model_projection",
        "per_layer_projection_norm": "model.per_layer_projection_norm",
        **{f"altup_projection_{i + 1}": f"model.altup_projections.{i}" for i in range(2)},
        **{
            f"altup_unembed_projection_{i + 1}": f"model.altup_unembed_projections.{i}"
            for i in range(2)
        },
        "norm": "model.norm",
        "altup/correct_output_scale": "altup.correct_output_scale",
        "decoder_block": "model.layers",
        **{f"attention/{x}": f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"attention/{x}": f"self_attn.{x}" for x in ("q_norm", "k_norm")},
    },
}


def make_backbone(config):
    """Make the backbone of a config, with random weights."""
    models, kind = keras_hub.models, config["model_type"]
    if kind == "gemma3n_text":
        return make_gemma3n(config)
    size = {"vocabulary_size": config["vocab_size"], "hidden_dim": config["hidden_size"]}
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    size |= {"num_layers": layers, "num_heads": heads}
    if kind == "opt":
        size |= {"max_sequence_length": config["max_position_embeddings"]}
        return models.OPTBackbone(intermediate_dim=config["ffn_dim"], dropout=0.0, **size)
    if kind == "bloom":
        return models.BloomBackbone(intermediate_dim=4 * config["hidden_size"], **size)
    if kind == "falcon":
        size["num_attention_heads"] = size.pop("num_heads")
        return models.FalconBackbone(intermediate_dim=config["ffn_hidden_size"], **size)
    rope, size["intermediate_dim"] = config["rope_parameters"], config["intermediate_size"]
    if kind == "gpt_neox":
        return models.GPTNeoXBackbone(
            rotary_percentage=rope["partial_rotary_factor"],
            rotary_max_wavelength=rope["rope_theta"],
            **size,
        )
    size["num_query_heads"] = size.pop("num_heads")
    return models.Phi3Backbone(
        num_key_value_heads=config["num_key_value_heads"],
        layer_norm_epsilon=config["rms_norm_eps"],
        max_sequence_length=config["max_position_embeddings"],
        pretraining_sequence_length=config["original_max_position_embeddings"],
        rope_max_wavelength=rope["rope_theta"],
        rope_scaling_type="su",
        rope_scaling_short_factor=rope["short_factor"],
        rope_scaling_long_factor=rope["long_factor"],
        **size,
    )


def make_gemma3n(config):
    """Make that of Gemma 3n, most of whose arguments have the names of the config."""
    rope = config["rope_parameters"]
    same = (
        *("num_hidden_layers", "pad_token_id", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "intermediate_size", "layer_types", "sliding_window", "laurel_rank"),
        *("max_position_embeddings", "vocab_size_per_layer_input", "rms_norm_eps"),
        *("hidden_size_per_layer_input", "activation_sparsity_pattern", "num_kv_shared_layers"),
        *("altup_num_inputs", "altup_coef_clip", "altup_active_idx", "altup_correct_scale"),
    )
    return keras_hub.models.Gemma3nBackbone(
        text_vocab_size=config["vocab_size"],
        text_hidden_size=config["hidden_size"],
        hidden_activation="gelu_approximate",
        rope_theta=rope["full_attention"]["rope_theta"],
        rope_local_base_freq=rope["sliding_attention"]["rope_theta"],
        final_logit_soft_cap=config["final_logit_softcapping"],
        **{name: config[name] for name in same},
    )


def split(tensors, config):
    """Add the parts of fused projections by names of their own."""
    kind, parts = config["model_type"], ("query", "key", "value")
    for name, x in list(tensors.items()):
        if kind in ("bloom", "falcon") and "query_key_value" in name:
            # Each head has its query, its key and its value.
            heads = config.get("num_attention_heads", config.get("n_head"))
            x = x.reshape(heads, 3, -1, *x.shape[1:])
            for i, part in enumerate(parts):
                key = name.replace("query_key_value", part)
                tensors[key] = x[:, i].reshape(-1, *x.shape[3:])
        elif "qkv_proj" in name:
            hidden, head = config["hidden_size"], config["hidden_size"] // 4
            ends = (hidden, hidden + config["num_key_value_heads"] * head)
            for part, value in zip(parts, np.split(x, ends), strict=True):
                tensors[name.replace("qkv_proj", part)] = value
        elif "gate_up_proj" in name:
            for part, value in zip(("gate", "up"), np.split(x, 2), strict=True):
                tensors[name.replace("gate_up_proj", part)] = value
    return tensors


def load_backbone(folder):
    """Make the backbone of a folder of `transformers`, with its weights."""
    config = json.loads((folder / "config.json").read_text())
    names, backbone = NAMES[config["model_type"]], make_backbone(config)
    tensors = split(load_file(folder / "model.safetensors"), config)
    used = set()
    own_keys = len(config.get("layer_types") or ()) - config.get("num_kv_shared_layers", 0)
    for variable in backbone.weights:
        layer, block, path = re.fullmatch(
            r"(?:text_model/)?(transformer_layer|decoder_block)?_?(\d*)/?(.*)", variable.path
        ).groups()
        *_, kind = path.split("/")
        where = path if path in names else path.removesuffix(f"/{kind}")
        ending = "bias" if kind in ("bias", "beta") else "weight"
        if re.search(r"/[kv]_(proj|norm)", path) and int(block) >= own_keys:
            continue  # of a block that attends to the keys of another one
        inner = names.get(where, where.replace("/", "."))
        key = ".".join([*([names[layer], block] if layer else []), inner, ending])
        key = key if key in tensors else key.removesuffix(".weight")
        value, used = tensors[key], {*used, key}
        if kind not in ("embeddings", "reverse_embeddings") or value.shape != variable.shape:
            value = value.T
        if "position_embedding" in path:
            value = tensors[key][-variable.shape[0] :]  # OPT leaves two rows unused
        variable.assign(value.reshape(variable.shape))
    return backbone
