"""The families as rows: to test another one with everything here, add a row to `ROWS`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import keras_hub
import numpy as np

VOCABULARY = 60


def _spread(backbone, seed):
    """Give the weights values large enough for the greedy choice to be clear."""
    rng = np.random.default_rng(seed)
    for variable in backbone.trainable_variables:
        value = np.asarray(variable)
        if value.ndim > 1:
            value = rng.normal(0, 1 / np.sqrt(np.prod(value.shape[:-1])) + 0.15, value.shape)
        else:
            value = value + rng.normal(0, 0.1, value.shape)
        variable.assign(value.astype(value.dtype))
    return backbone


def make(backbone_class, **defaults):
    """Return a function that makes tiny random backbones of a class."""
    config = {"vocabulary_size": VOCABULARY, "num_layers": 2, **defaults}

    def make_one(seed=0, **kwargs):
        keras.utils.set_random_seed(seed)  # vectors, such as sinks, may begin at random
        return _spread(backbone_class(**{**config, **kwargs}), seed)

    return make_one


def make_gpt2(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "max_sequence_length": 64,
        "dropout": 0.0,
    }
    return _spread(keras_hub.models.GPT2Backbone(**{**config, **kwargs}), seed)


def make_deep_gpt2(seed=0, **kwargs):
    """One of three blocks, for what takes more than two: to be swapped, say, and to stay."""
    return make_gpt2(seed, **{"num_layers": 3, **kwargs})


def make_gemma(seed=0, **kwargs):
    config = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 32,
        "intermediate_dim": 96,
        "head_dim": 8,
    }
    return _spread(keras_hub.models.GemmaBackbone(**{**config, **kwargs}), seed)


def make_gemma2(seed=0, **kwargs):
    config = {
        "num_layers": 2,
        "num_key_value_heads": 2,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 6,
    }
    return make_gemma(seed, **{**config, **kwargs})


@dataclass(frozen=True)
class Row:
    """A family under test.

    Attributes:
        make: `(seed=0, **config) -> backbone`, tiny and random.
        task: KerasHub's own task of the family: an independent way to generate.
        shapes: configs of odd shapes, which are opened too.
        layers: `{site: sub-layer}`, such as `{"query": "attention.query_dense"}`: sub-layers of the
            backbone's own blocks that give what stands at a site.
        block_mask: name of the block's argument for the padding mask.
        block_arguments: other arguments that the backbone gives its blocks.
        inputs: inputs of the backbone and of the task besides the text.
        task_inputs: inputs of the task alone.
        task_is_right: whether KerasHub's own task generates what its backbone computes.
        lora: names of the layers that LoRA goes into, where KerasHub's own are not there.
        int8_error: what Keras says where it cannot quantise the backbone.
        in_numpy: whether `numpy_models.py` has the family, for the tests of every rewrite.
        tolerance: of the opened and the cached graph, relative to the largest hidden state.
    """

    make: Callable[..., Any]
    task: type
    shapes: tuple[dict[str, Any], ...] = ()
    layers: dict[str, str] = field(default_factory=dict)
    block_mask: str = "decoder_padding_mask"
    block_arguments: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    task_inputs: dict[str, Any] = field(default_factory=dict)
    task_is_right: bool = True
    lora: tuple[str, ...] | None = None
    int8_error: str = ""
    in_numpy: bool = False
    tolerance: float = 5e-6


GPT2_LAYERS = {
    "query": "_self_attention_layer.query_dense",
    "attention_output": "_self_attention_layer.output_dense",
    "mlp_hidden": "_feedforward_intermediate_dense",
}
LLAMA_LAYERS = {
    "attention_norm": "_self_attention_layernorm",
    "query": "_self_attention_layer._query_dense",
    "key": "_self_attention_layer._key_dense",
    "value": "_self_attention_layer._value_dense",
    "attention_output": "_self_attention_layer._output_dense",
    "mlp_norm": "_feedforward_layernorm",
    "mlp_output": "_feedforward_output_dense",
}

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
    "qwen3_5": Row(
        make(
            keras_hub.models.Qwen3_5Backbone,
            num_query_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            hidden_dim=32,
            intermediate_dim=48,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            partial_rotary_factor=0.5,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=6,
            linear_value_head_dim=10,
        ),
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
        layers={
            "attention_norm": "_input_layernorm",
            "attention_output": "_self_attention_dropout",
            "mlp_norm": "_post_attention_layernorm",
            "mlp_output": "_feedforward_output_dense",
        },
        task_is_right=False,
    ),
}
"""The first is the one that tests outside of the harness run on by default."""

FAMILIES = {name: row.make for name, row in ROWS.items() if row.in_numpy}
TASKS = {name: ROWS[name].task for name in FAMILIES}
