"""Backbones of the families that KerasHub does not convert, with weights of `transformers`.

Weights are copied by name: `NAMES` says which layer of `transformers` is which of KerasHub.
"""

import json
import re

import keras_hub
import numpy as np
from safetensors.numpy import load_file

NAMES = {
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
}


def make_backbone(config):
    """Make the backbone of a config, with random weights."""
    rope = config["rope_parameters"]
    return keras_hub.models.Phi3Backbone(
        vocabulary_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"],
        num_query_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        layer_norm_epsilon=config["rms_norm_eps"],
        max_sequence_length=config["max_position_embeddings"],
        pretraining_sequence_length=config["original_max_position_embeddings"],
        rope_max_wavelength=rope["rope_theta"],
        rope_scaling_type="su",
        rope_scaling_short_factor=rope["short_factor"],
        rope_scaling_long_factor=rope["long_factor"],
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
