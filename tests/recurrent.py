"""The families with recurrent blocks as rows; see `families.py`."""

import keras_hub

from tests.family_row import Row, make

QWEN3_5 = {
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
QWEN3_5_LAYERS = {
    "attention_norm": "_input_layernorm",
    "attention_output": "_self_attention_dropout",
    "mlp_norm": "_post_attention_layernorm",
}
RWKV7 = {
    "hidden_size": 32,
    "head_size": 8,
    "intermediate_dim": 48,
    "gate_lora": 6,
    "mv_lora": 4,
    "aaa_lora": 5,
    "decay_lora": 7,
}
TOLERANCE = 1e-5
"""The norm of what a head reads makes rounding larger where that is little."""

RECURRENT = {
    "qwen3_5": Row(
        make(keras_hub.models.Qwen3_5Backbone, intermediate_dim=48, **QWEN3_5),
        keras_hub.models.Qwen3_5CausalLM,
        (
            {
                "num_key_value_heads": 1,
                "head_dim": 12,
                "partial_rotary_factor": 1.0,
                "linear_num_key_heads": 4,
                "linear_conv_kernel_dim": 2,
                "tie_word_embeddings": True,
            },
            {
                "num_key_value_heads": 4,
                "head_dim": 8,
                "layer_types": ["full_attention", "linear_attention"],
                "linear_num_key_heads": 1,
                "sliding_window_size": 6,
            },
        ),
        layers={**QWEN3_5_LAYERS, "mlp_output": "_feedforward_output_dense"},
        task_is_right=False,
        tolerance=TOLERANCE,
    ),
    "qwen3_5_moe": Row(
        make(
            keras_hub.models.Qwen3_5MoeBackbone,
            moe_intermediate_dim=24,
            shared_expert_intermediate_size=40,
            num_experts=4,
            top_k=2,
            **QWEN3_5,
        ),
        keras_hub.models.Qwen3_5MoeCausalLM,
        (
            {"num_key_value_heads": 1, "num_experts": 7, "top_k": 3, "tie_word_embeddings": True},
            {"num_key_value_heads": 4, "head_dim": 12, "partial_rotary_factor": 1.0, "top_k": 4},
        ),
        layers={**QWEN3_5_LAYERS, "router": "mlp._router_gate", "mlp_output": "mlp"},
        task_is_right=False,
        tolerance=TOLERANCE,
    ),
    "rwkv7": Row(
        make(keras_hub.models.RWKV7Backbone, **RWKV7),
        keras_hub.models.RWKV7CausalLM,
        (
            {"head_size": 16, "num_layers": 3, "mv_lora": 3},
            {"hidden_size": 24, "head_size": 4, "num_layers": 1, "intermediate_dim": 10},
        ),
        layers={"attention_norm": "ln1", "mlp_norm": "ln2", "mlp_output": "ffn"},
        block_mask="padding_mask",
        task_is_right=False,  # it takes prompts in two parts: see `opening/test_rwkv7.py`
        head="head",
        needs_first_block=True,
        tolerance=TOLERANCE,
    ),
}
