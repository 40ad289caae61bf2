"""Random models that KerasHub loads from a checkpoint of `transformers`, for the benchmark."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,  # what KerasHub's converter takes, whatever is written here
    "tie_word_embeddings": False,
}
_TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_QWEN3 = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_sliding_window": False}
_MIXTRAL = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "sliding_window": None,
}
_GEMMA3 = {"query_pre_attn_scalar": 256, "sliding_window": 512, "tie_word_embeddings": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama_124m": {"model_type": "llama", **_LLAMA},
    "qwen3_119m": {"model_type": "qwen3", **_LLAMA, "head_dim": 128, **_QWEN3},
    "gemma3_141m": {
        "model_type": "gemma3_text",
        **_LLAMA,
        "vocab_size": 64000,
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        **_GEMMA3,
    },
    "mixtral_99m": {
        "model_type": "mixtral",
        **_LLAMA,
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        **_MIXTRAL,
    },
    "llama_tiny": {"model_type": "llama", **_LLAMA, **_TINY},
    "qwen3_tiny": {"model_type": "qwen3", **_LLAMA, **_TINY, **_QWEN3},
    "mixtral_tiny": {"model_type": "mixtral", **_LLAMA, **_TINY, **_MIXTRAL},
    "gemma3_tiny": {
        "model_type": "gemma3_text",
        **_LLAMA,
        **_TINY,
        **_GEMMA3,
        "query_pre_attn_scalar": 8,
    },
}
"""Configs as `transformers` writes them."""


def load(config: dict[str, Any], dtype: str) -> tuple[keras.Model, Any]:
    """Make a random model, and load it with both libraries.

    Args:
        config: of `transformers`.
        dtype: of the backbone.

    Returns:
        The backbone, and the model of `transformers`: `None` where that is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = save(config, folder)
        except ImportError:
            model = None
            Path(folder, "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
        backbone = keras_hub.models.Backbone.from_preset(
            folder, load_weights=model is not None, dtype=dtype
        )
    if model is None:
        spread(backbone)
    return backbone, model


def spread(backbone: keras.Model, seed: int = 0) -> None:
    """Make the weights random, so that texts vary and the greedy choice is clear."""
    rng = np.random.default_rng(seed)
    for variable in backbone.trainable_variables:
        if variable.ndim > 1:
            scale = 0.1 if "embedding" in variable.path else backbone.hidden_dim**-0.5
            variable.assign(scale * rng.standard_normal(variable.shape, "float32"))


def save(config: dict[str, Any], folder: str) -> Any:
    """Make a random model of `transformers`, save it to a folder, and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = AutoConfig.for_model(**config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 0.1 if "embed" in name else config["hidden_size"] ** -0.5
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model
