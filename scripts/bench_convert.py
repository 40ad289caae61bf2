"""KerasHub models as `transformers` ones, for the peers of the benchmark: the same weights."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub
import numpy as np


def convert(backbone: keras.Model) -> Any:
    """Make a `transformers` model with the weights of a KerasHub one, and compare their logits.

    It goes to the accelerator, if PyTorch knows of one.
    """
    import torch

    is_gpt2 = isinstance(backbone, keras_hub.models.GPT2Backbone)
    of_gemma = _gemma2_config if getattr(backbone, "use_post_ffw_norm", False) else _gemma_config
    config, kind = (_gpt2_config if is_gpt2 else of_gemma)(backbone)
    weights = _gpt2_weights(backbone) if is_gpt2 else _gemma_weights(backbone)
    half = backbone.compute_dtype != "float32"
    dtype, tolerance = (torch.bfloat16, 5e-2) if half else (torch.float32, 1e-4)
    model = kind(config)
    state = {
        name: torch.tensor(np.array(value, "float32"), dtype=dtype)
        for name, value in weights.items()
    }
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    token_ids = np.arange(8)[None]
    hidden = backbone.predict_on_batch({"token_ids": token_ids, "padding_mask": token_ids >= 0})
    wanted = np.asarray(backbone.token_embedding(hidden, reverse=True), "float32")
    with torch.inference_mode():
        logits = model(torch.tensor(token_ids, device=model.device)).logits
    if np.abs(logits.float().cpu().numpy() - wanted).max() > tolerance * np.abs(wanted).max():
        raise RuntimeError("the converted model gives other logits than the KerasHub one")
    return model


def _gpt2_config(backbone: keras_hub.models.GPT2Backbone) -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=backbone.vocabulary_size,
        n_positions=backbone.max_sequence_length,
        n_embd=backbone.hidden_dim,
        n_layer=backbone.num_layers,
        n_head=backbone.num_heads,
        n_inner=backbone.intermediate_dim,
        bos_token_id=None,
        eos_token_id=None,
    )
    return config, GPT2LMHeadModel


def _gpt2_weights(backbone: keras_hub.models.GPT2Backbone) -> dict[str, Any]:
    """Name the weights as `transformers` does. Its linear layers store [inputs, outputs]."""
    size = backbone.hidden_dim
    layer = backbone.get_layer
    embedding = layer("token_embedding").embeddings
    weights = {
        "transformer.wte.weight": embedding,
        "lm_head.weight": embedding,
        "transformer.wpe.weight": layer("position_embedding").position_embeddings,
        **_norm("transformer.ln_f", layer("layer_norm")),
    }
    for i in range(backbone.num_layers):
        block, at = layer(f"transformer_layer_{i}"), f"transformer.h.{i}"
        attention = block._self_attention_layer
        parts = [attention.query_dense, attention.key_dense, attention.value_dense]
        kernels = [np.reshape(part.kernel, (size, size)) for part in parts]
        biases = [np.reshape(part.bias, size) for part in parts]
        weights |= {
            **_norm(f"{at}.ln_1", block._self_attention_layer_norm),
            **_norm(f"{at}.ln_2", block._feedforward_layer_norm),
            f"{at}.attn.c_attn.weight": np.concatenate(kernels, axis=1),
            f"{at}.attn.c_attn.bias": np.concatenate(biases),
            f"{at}.attn.c_proj.weight": np.reshape(attention.output_dense.kernel, (size, size)),
            f"{at}.attn.c_proj.bias": attention.output_dense.bias,
            f"{at}.mlp.c_fc.weight": block._feedforward_intermediate_dense.kernel,
            f"{at}.mlp.c_fc.bias": block._feedforward_intermediate_dense.bias,
            f"{at}.mlp.c_proj.weight": block._feedforward_output_dense.kernel,
            f"{at}.mlp.c_proj.bias": block._feedforward_output_dense.bias,
        }
    return weights


def _norm(name: str, norm: Any) -> dict[str, Any]:
    return {f"{name}.weight": norm.gamma, f"{name}.bias": norm.beta}


def _gemma_config(backbone: keras_hub.models.GemmaBackbone) -> tuple[Any, Any]:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaConfig(**_gemma_sizes(backbone)), GemmaForCausalLM


def _gemma2_config(backbone: keras_hub.models.GemmaBackbone) -> tuple[Any, Any]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    normalize = backbone.query_head_dim_normalize
    by_hidden = backbone.hidden_dim // backbone.num_query_heads
    config = Gemma2Config(
        **_gemma_sizes(backbone),
        query_pre_attn_scalar=backbone.head_dim if normalize else by_hidden,
        sliding_window=backbone.sliding_window_size,
        attn_logit_softcapping=backbone.attention_logit_soft_cap,
        final_logit_softcapping=backbone.final_logit_soft_cap,
        attn_implementation="eager",  # the only one that has soft caps on a CPU
    )
    return config, Gemma2ForCausalLM


def _gemma_sizes(backbone: keras_hub.models.GemmaBackbone) -> dict[str, Any]:
    return {
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "intermediate_size": backbone.intermediate_dim // 2,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_query_heads,
        "num_key_value_heads": backbone.num_key_value_heads,
        "head_dim": backbone.head_dim,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gemma_weights(backbone: keras_hub.models.GemmaBackbone) -> dict[str, Any]:
    """Name the weights as `transformers` does. Its linear layers store [outputs, inputs]."""
    embedding = backbone.token_embedding.embeddings
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": backbone.layer_norm.scale,
    }
    for i, block in enumerate(backbone.transformer_layers):
        at, attention = f"model.layers.{i}", block.attention
        for name in ("query", "key", "value"):
            kernel = np.asarray(getattr(attention, f"{name}_dense").kernel)  # heads, inputs, head
            projection = np.moveaxis(kernel, 2, 1).reshape(-1, kernel.shape[1])
            weights[f"{at}.self_attn.{name[0]}_proj.weight"] = projection
        output = np.asarray(attention.output_dense.kernel)
        weights |= {
            f"{at}.self_attn.o_proj.weight": output.reshape(-1, output.shape[2]).T,
            f"{at}.input_layernorm.weight": block.pre_attention_norm.scale,
            **_gemma_norms(at, block),
            f"{at}.mlp.gate_proj.weight": np.transpose(block.gating_ffw.kernel),
            f"{at}.mlp.up_proj.weight": np.transpose(block.gating_ffw_2.kernel),
            f"{at}.mlp.down_proj.weight": np.transpose(block.ffw_linear.kernel),
        }
    return weights


def _gemma_norms(at: str, block: Any) -> dict[str, Any]:
    """Name the norms of a block but the first: one, or with those behind each part three."""
    if not getattr(block, "use_post_ffw_norm", False):
        return {f"{at}.post_attention_layernorm.weight": block.pre_ffw_norm.scale}
    return {
        f"{at}.post_attention_layernorm.weight": block.post_attention_norm.scale,
        f"{at}.pre_feedforward_layernorm.weight": block.pre_ffw_norm.scale,
        f"{at}.post_feedforward_layernorm.weight": block.post_ffw_norm.scale,
    }
