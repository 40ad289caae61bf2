"""The families as rows: to test another one with everything here, add a row to `ROWS`."""

import keras_hub
import numpy as np

from tests.family_row import (  # noqa: F401 - tests take them from here
    LLAMA_LAYERS,
    VOCABULARY,
    Row,
    make,
    make_deep_gpt2,
    make_gemma,
    make_gemma2,
    make_gpt2,
)
from tests.mixtures import MIXTURES
from tests.recurrent import RECURRENT
from tests.streams import STREAMS

GPT2_LAYERS = {
    "query": "_self_attention_layer.query_dense",
    "attention_output": "_self_attention_layer.output_dense",
    "mlp_hidden": "_feedforward_intermediate_dense",
}

ROWS = {
    "gpt2": Row(
        make_gpt2,
        keras_hub.models.GPT2CausalLM,
        ({"num_heads": 2, "num_layers": 1, "hidden_dim": 24},),
        layers=GPT2_LAYERS,
        in_numpy=True,
    ),
    "gemma": Row(
        make_gemma,
        keras_hub.models.GemmaCausalLM,
        ({"num_key_value_heads": 4, "head_dim": 16},),
        layers={"query": "attention.query_dense", "mlp_output": "ffw_linear"},
        block_mask="padding_mask",
        in_numpy=True,
    ),
    "gemma2": Row(
        make_gemma2,
        keras_hub.models.GemmaCausalLM,
        ({"sliding_window_size": 3, "num_key_value_heads": 1},),
        layers={"query": "attention.query_dense", "mlp_output": "post_ffw_norm"},
        block_mask="padding_mask",
        in_numpy=True,
    ),
    "gemma3": Row(
        make(
            keras_hub.models.Gemma3Backbone,
            image_size=16,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            head_dim=16,
            use_post_ffw_norm=True,
            use_post_attention_norm=True,
            use_sliding_window_attention=True,
            sliding_window_size=6,
        ),
        keras_hub.models.Gemma3CausalLM,
        (
            {"num_layers": 7, "num_key_value_heads": 1, "global_rope_scaling_factor": 8.0},
            {
                "num_key_value_heads": 4,
                "head_dim": 6,
                "sliding_window_size": 32,
                "attention_logit_soft_cap": 5.0,
                "final_logit_soft_cap": 3.0,
                "use_query_key_norm": False,
                "use_post_ffw_norm": False,
                "use_post_attention_norm": False,
            },
        ),
        layers={
            "query": "attention.query_dense",
            "attention_output": "post_attention_norm",
            "mlp_norm": "pre_ffw_norm",
            "mlp_output": "post_ffw_norm",
        },
        block_mask="padding_mask",
        task_inputs={"images": np.zeros((3, 0, 1, 1, 3), "float32")},
    ),
    "gemma4": Row(
        make(
            keras_hub.models.Gemma4Backbone,
            image_size=16,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            head_dim=8,
            sliding_window_size=6,
            sliding_window_pattern=2,
            global_head_dim=16,
            global_rope_partial_rotary_factor=0.5,
            hidden_size_per_layer_input=8,
        ),
        keras_hub.models.Gemma4CausalLM,
        (
            {  # as the small models: the last two blocks attend to what the first two keep
                "num_layers": 4,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "num_key_value_heads": 1,
            },
            {  # as the large ones: global blocks make keys and values by one projection
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
                "sliding_window_size": 32,
                "attention_logit_soft_cap": 5.0,
                "final_logit_soft_cap": 3.0,
            },
            {  # with a mixture of experts beside the MLP
                "enable_moe_block": True,
                "num_experts": 6,
                "expert_intermediate_dim": 12,
                "num_experts_per_token": 2,
                "num_key_value_heads": 4,
                "hidden_size_per_layer_input": 0,
            },
        ),
        layers={
            "query": "attention.query_dense",
            "key": "attention.key_dense",
            "attention_output": "post_attention_norm",
            "mlp_norm": "pre_ffw_norm",
            "mlp_output": "post_ffw_norm",
        },
        block_mask="padding_mask",
        lora=("query", "value", "ffw_gating"),
        int8_is_right=False,
        inputs={
            "position_ids": lambda inputs: np.cumsum(np.ones_like(inputs["token_ids"]), axis=1) - 1
        },
    ),
    "llama": Row(
        make(
            keras_hub.models.Llama3Backbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
        ),
        keras_hub.models.Llama3CausalLM,
        (
            {"num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_dim": 24},
            {
                "num_key_value_heads": 4,
                "rope_frequency_adjustment_factor": 8.0,
                "rope_low_freq_factor": 1.0,
                "rope_high_freq_factor": 4.0,
                "rope_pretraining_sequence_length": 16,
            },
        ),
        layers=LLAMA_LAYERS,
    ),
    "mistral": Row(
        make(
            keras_hub.models.MistralBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            sliding_window=5,
        ),
        keras_hub.models.MistralCausalLM,
        (
            {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 30},
            {"num_key_value_heads": 4, "head_dim": 6, "sliding_window": None},
        ),
        layers=LLAMA_LAYERS,
    ),
    "qwen2": Row(
        make(
            keras_hub.models.QwenBackbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
        ),
        keras_hub.models.QwenCausalLM,
        (
            {"num_key_value_heads": 1, "tie_word_embeddings": False, "hidden_dim": 24},
            {
                "num_key_value_heads": 4,
                "use_sliding_window_attention": True,
                "sliding_window_size": 4,
            },
        ),
        layers=LLAMA_LAYERS,
    ),
    "qwen3": Row(
        make(
            keras_hub.models.Qwen3Backbone,
            num_query_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            hidden_dim=32,
            intermediate_dim=48,
        ),
        keras_hub.models.Qwen3CausalLM,
        (
            {"num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": False},
            {"num_key_value_heads": 4, "head_dim": 6, "sliding_window_size": 4},
        ),
        layers=LLAMA_LAYERS,
    ),
    **MIXTURES,
    "opt": Row(
        make(
            keras_hub.models.OPTBackbone,
            num_heads=4,
            hidden_dim=32,
            intermediate_dim=64,
            max_sequence_length=64,
            dropout=0.0,
        ),
        keras_hub.models.OPTCausalLM,
        (
            {"num_heads": 2, "hidden_dim": 24},
            {"num_heads": 1, "num_layers": 1, "max_sequence_length": 20},
        ),
        layers=GPT2_LAYERS,
    ),
    "smollm3": Row(
        make(
            keras_hub.models.SmolLM3Backbone,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
            attention_bias=False,
            attention_dropout=0.0,
            rope_layer_enabled_list=[True, False, True],
            layer_types=["full_attention"] * 3,
            mlp_bias=False,
            layer_norm_epsilon=1e-6,
            max_position_embeddings=64,
            rope_theta=10000.0,
            partial_rotary_factor=1.0,
        ),
        keras_hub.models.SmolLM3CausalLM,
        (
            {"num_key_value_heads": 1, "attention_bias": True, "hidden_dim": 24},
            {"num_key_value_heads": 4, "mlp_bias": True, "rope_layer_enabled_list": [False] * 2},
        ),
        layers={
            "attention_norm": "input_layernorm",
            "query": "self_attn.q_proj",
            "attention_output": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp_output": "mlp.down_proj",
        },
        lora=("q_proj", "v_proj"),
        int8_error="isn't yet built",
    ),
    "phi3": Row(
        make(
            keras_hub.models.Phi3Backbone,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=32,
            intermediate_dim=48,
        ),
        keras_hub.models.Phi3CausalLM,
        (
            {"num_key_value_heads": 1, "hidden_dim": 24, "num_query_heads": 2},
            {
                "num_key_value_heads": 4,
                "rope_scaling_type": "su",
                "rope_scaling_short_factor": [1.0, 1.3, 2.0, 5.0],
                "rope_scaling_long_factor": [2.0, 4.0, 8.0, 16.0],
                "pretraining_sequence_length": 24,
                "max_sequence_length": 64,
            },
        ),
        layers={
            "attention_norm": "pre_attention_layernorm",
            "query": "attention.query_dense",
            "attention_output": "attention.output_dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp_output": "feedforward_output_dense",
        },
    ),
    "falcon": Row(
        make(
            keras_hub.models.FalconBackbone,
            num_attention_heads=4,
            hidden_dim=32,
            intermediate_dim=64,
        ),
        keras_hub.models.FalconCausalLM,
        (
            {"num_attention_heads": 3, "hidden_dim": 24},
            {"num_attention_heads": 1, "hidden_dim": 12, "num_layers": 1},
        ),
        layers={
            "attention_norm": "input_layernorm",
            "query": "attention_layer.query_dense",
            "attention_output": "attention_layer.output_dense",
            "mlp_hidden": "dense_h_to_4h",
            "mlp_output": "dense_4h_to_h",
        },
    ),
    "bloom": Row(
        make(keras_hub.models.BloomBackbone, num_heads=4, hidden_dim=32, intermediate_dim=64),
        keras_hub.models.BloomCausalLM,
        ({"num_heads": 6, "hidden_dim": 36}, {"num_heads": 1, "hidden_dim": 12, "num_layers": 1}),
        layers={
            "attention_norm": "_pre_attention_layernorm",
            "query": "_self_attention_layer._query_dense",
            "attention_output": "_self_attention_layer._output_dense",
            "mlp_output": "_mlp_output_dense",
        },
    ),
    "gpt_neo_x": Row(
        make(keras_hub.models.GPTNeoXBackbone, num_heads=4, hidden_dim=32, intermediate_dim=64),
        keras_hub.models.GPTNeoXCausalLM,
        (
            {"num_heads": 2, "hidden_dim": 24, "rotary_percentage": 0.5},
            {"num_heads": 1, "hidden_dim": 12, "rotary_percentage": 1.0},
        ),
        layers={
            "attention_norm": "_self_attention_layer_norm",
            "attention_output": "_self_attention_layer._output_dense",
            "mlp_norm": "_feedforward_layer_norm",
            "mlp_hidden": "_feedforward_intermediate_dense",
            "mlp_output": "_feedforward_output_dense",
        },
        task_is_right=False,
        lora=("query_key_value",),
    ),
    **RECURRENT,
    **STREAMS,
}
"""The first is the one that tests outside of the harness run on by default."""

FAMILIES = {name: row.make for name, row in ROWS.items() if row.in_numpy}
TASKS = {name: ROWS[name].task for name in FAMILIES}
