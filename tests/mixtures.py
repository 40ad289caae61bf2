"""The families with mixtures of experts as rows; see `families.py`."""

import keras_hub

from tests.family_row import LLAMA_LAYERS, Row, make

MIXTRAL_LAYERS = {
    "attention_norm": "_self_attention_layernorm",
    "query": "_self_attention_layer.query_dense",
    "key": "_self_attention_layer.key_dense",
    "value": "_self_attention_layer.value_dense",
    "attention_output": "_self_attention_layer.output_dense",
    "mlp_norm": "_feedforward_layernorm",
    "router": "_sparse_moe_block._sparse_feedforward_gate_dense",
    "mlp_output": "_sparse_moe_block",
}

QWEN_MOE_LAYERS = {
    "attention_output": "_self_attention_layer._output_dense",
    "router": "mlp._sparse_feedforward_gate_dense",
    "mlp_output": "mlp",
}

MIXTURES = {
    "mixtral": Row(
        make(
            keras_hub.models.MixtralBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            num_experts=4,
            sliding_window=5,
        ),
        keras_hub.models.MixtralCausalLM,
        (
            {"num_key_value_heads": 1, "num_experts": 6, "top_k": 1, "sliding_window": 30},
            {"num_key_value_heads": 4, "top_k": 3, "hidden_dim": 24, "sliding_window": None},
        ),
        layers=MIXTRAL_LAYERS,
    ),
    "qwen2_moe": Row(
        make(
            keras_hub.models.QwenMoeBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            moe_intermediate_dim=24,
            shared_expert_intermediate_dim=40,
            num_experts=4,
            top_k=2,
        ),
        keras_hub.models.QwenMoeCausalLM,
        (
            {"num_key_value_heads": 1, "norm_top_k_prob": True, "mlp_only_layers": [0]},
            {"num_key_value_heads": 4, "hidden_dim": 24, "tie_word_embeddings": True},
        ),
        layers={**MIXTRAL_LAYERS, **QWEN_MOE_LAYERS},
    ),
    "qwen3_moe": Row(
        make(
            keras_hub.models.Qwen3MoeBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            hidden_dim=32,
            intermediate_dim=48,
            moe_intermediate_dim=24,
            num_experts=8,
            top_k=2,
            norm_top_k_prob=True,
        ),
        keras_hub.models.Qwen3MoeCausalLM,
        (
            {"num_key_value_heads": 1, "head_dim": 12, "decoder_sparse_step": 2},
            {
                "num_key_value_heads": 4,
                "head_dim": 6,
                "norm_top_k_prob": False,
                "tie_word_embeddings": True,
                "sliding_window_size": 4,
            },
        ),
        layers={**LLAMA_LAYERS, **QWEN_MOE_LAYERS},
    ),
    "gpt_oss": Row(
        make(
            keras_hub.models.GptOssBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            num_experts=4,
            sliding_window=5,
            rope_scaling_factor=32.0,
        ),
        keras_hub.models.GptOssCausalLM,
        (
            {"num_key_value_heads": 1, "head_dim": 7, "num_experts": 2, "sliding_window": 30},
            {"num_key_value_heads": 4, "head_dim": 12, "num_experts": 7, "top_k": 3},
        ),
        layers={
            "attention_norm": "input_layernorm",
            "query": "self_attention_layer.query_dense",
            "key": "self_attention_layer.key_dense",
            "value": "self_attention_layer.value_dense",
            "attention_output": "self_attention_layer.output_dense",
            "mlp_norm": "post_attention_layernorm",
            "router": "sparse_moe_block.router.router_dense",
            "expert_weights": "sparse_moe_block.router",
            "mlp_output": "sparse_moe_block",
        },
    ),
}
