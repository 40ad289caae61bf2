"""The tiny models of `make_hf_family_fixtures.py`: a config for each family.

A config has what KerasHub and `transformers` agree on; the table in
`tests/opening/test_hf_families.py` says what is left out.
"""

from dataclasses import dataclass, field
from typing import Any

import transformers
from make_hf_fixtures import VOCABULARY_SIZE


@dataclass(frozen=True)
class Recipe:
    """One fixture.

    Attributes:
        config: of the model.
        matters: changes of the config, one by one, that must change the logits.
        saved: what `config.json` says otherwise than the config, since KerasHub reads it so.
        embedding_scale: standard deviation of the token embedding.
        scales: what some weights are multiplied by, so that texts do not repeat one token.
        mxfp4: whether the experts are saved in four bits, as published.
        attention: which implementation of attention `transformers` takes.
        images: whether the model takes images too, of which nothing is expected here.
    """

    config: transformers.PretrainedConfig
    matters: tuple[dict[str, Any], ...] = ()
    saved: dict[str, Any] = field(default_factory=dict)
    embedding_scale: float = 0.3
    scales: dict[str, float] = field(default_factory=dict)
    mxfp4: bool = False
    attention: str = "eager"
    images: bool = False


def make_config(model_type: str, **kwargs: Any) -> transformers.PretrainedConfig:
    """Return the config of a tiny model; what a config has not, it does not take."""
    common = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": VOCABULARY_SIZE - 1,
        "pad_token_id": 0,
    }
    return transformers.AutoConfig.for_model(model_type, **{**common, **kwargs})


def rope(theta: float, kind: str = "default", **kwargs: Any) -> dict[str, Any]:
    """Return parameters of rotary positions."""
    return {"rope_type": kind, "rope_theta": theta, **kwargs}


def with_images(
    model_type: str, text: transformers.PretrainedConfig, vision: dict[str, Any]
) -> transformers.PretrainedConfig:
    """Return the config of a model that takes images too, as it is published."""
    return transformers.AutoConfig.for_model(
        model_type,
        text_config=text.to_dict(),
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
    )


LLAMA_3 = rope(
    500.0,  # with 4 frequencies: one is kept, one smoothed, two are scaled
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=40,
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA_3 = {
    "sliding_attention": rope(10_000.0),
    "full_attention": rope(1_000_000.0, "linear", factor=8.0),
}
GEMMA_4_HEADS = {"global_head_dim": 16}  # published so; `transformers` 5 saves heads by block
GEMMA_4_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
LINEAR = {
    "rope_parameters": rope(1000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_3_5 = make_config("qwen3_5_text", **LINEAR)
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}

RECIPES = {
    "llama": Recipe(
        make_config(
            "llama", rope_parameters=LLAMA_3, max_position_embeddings=320, rms_norm_eps=1e-6
        ),
        matters=({"rope_parameters": rope(500.0)},),
    ),
    "mistral": Recipe(
        make_config(
            "mistral",
            rope_parameters=rope(1000.0),
            num_key_value_heads=1,
            head_dim=12,
            sliding_window=5,
        ),
        matters=({"sliding_window": 6}, {"rope_parameters": rope(10_000.0)}),
    ),
    "qwen2": Recipe(
        make_config("qwen2", rope_parameters=rope(1000.0), tie_word_embeddings=True),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "qwen3": Recipe(
        make_config(
            "qwen3",
            rope_parameters=rope(1000.0),
            num_key_value_heads=1,
            head_dim=12,
            rms_norm_eps=1e-5,
        ),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "smollm3": Recipe(
        make_config("smollm3", rope_parameters=rope(1000.0), no_rope_layers=[1, 0, 1]),
        matters=({"no_rope_layers": [1, 1, 1]}, {"rope_parameters": rope(10_000.0)}),
    ),
    "phi3": Recipe(
        make_config(
            "phi3",
            rope_parameters=rope(
                10_000.0,
                "longrope",
                short_factor=[1.0, 1.5, 2.5, 4.0],
                long_factor=[2.0, 4.0, 8.0, 16.0],
                original_max_position_embeddings=40,
            ),
            original_max_position_embeddings=40,
            max_position_embeddings=80,
            tie_word_embeddings=False,
        ),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "phi3_mini": Recipe(
        make_config("phi3", rope_parameters=rope(1000.0), sliding_window=5),
        matters=({"sliding_window": 6}, {"rope_parameters": rope(10_000.0)}),
    ),
    "phi4_mini": Recipe(
        make_config(
            "phi3",
            rope_parameters=rope(
                1000.0,
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.5, 2.5],
                long_factor=[2.0, 4.0, 8.0],
                original_max_position_embeddings=40,
            ),
            original_max_position_embeddings=40,
            max_position_embeddings=80,
            tie_word_embeddings=True,
        ),
        matters=({"rope_parameters": rope(1000.0, partial_rotary_factor=0.75)},),
        embedding_scale=0.1,
    ),
    "opt": Recipe(
        make_config("opt", ffn_dim=48, dropout=0.0),
        matters=({"activation_function": "gelu"},),
        embedding_scale=0.1,
    ),
    "gpt_neox": Recipe(
        make_config(
            "gpt_neox",
            rope_parameters=rope(1000.0, partial_rotary_factor=0.5),
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        ),
        matters=(
            {"rope_parameters": rope(1000.0, partial_rotary_factor=1.0)},
            {"use_parallel_residual": False},
        ),
        embedding_scale=0.1,
    ),
    "pythia": Recipe(
        make_config(
            "gpt_neox",
            rope_parameters=rope(1000.0, partial_rotary_factor=0.25),
            hidden_act="gelu",
            tie_word_embeddings=False,
        ),
        matters=({"hidden_act": "gelu_new"}, {"use_parallel_residual": False}),
        embedding_scale=0.1,
    ),
    "bloom": Recipe(
        make_config("bloom", hidden_size=36, num_hidden_layers=2, num_attention_heads=6),
        embedding_scale=0.1,
        scales={"word_embeddings_layernorm": 0.1},
    ),
    "falcon": Recipe(
        make_config(
            "falcon",
            alibi=True,
            multi_query=False,
            num_kv_heads=4,
            parallel_attn=False,
            bias=True,
            ffn_hidden_size=48,
            tie_word_embeddings=True,
        ),
        matters=({"activation": "gelu_new"},),
        embedding_scale=0.1,
        attention="sdpa",  # the other one adds the biases of ALiBi twice
    ),
    "mixtral": Recipe(
        make_config(
            "mixtral",
            rope_parameters=rope(1000.0),
            sliding_window=5,
            num_local_experts=4,
            intermediate_size=24,
        ),
        matters=({"sliding_window": 6}, {"num_experts_per_tok": 1}),
    ),
    "qwen2_moe": Recipe(
        make_config(
            "qwen2_moe",
            rope_parameters=rope(1000.0),
            shared_expert_intermediate_size=24,
            norm_topk_prob=False,
            **EXPERTS,
        ),
        matters=({"norm_topk_prob": True}, {"num_experts_per_tok": 1}),
    ),
    "qwen3_moe": Recipe(
        make_config(
            "qwen3_moe",
            rope_parameters=rope(1000.0),
            head_dim=12,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            **EXPERTS,
        ),
        matters=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
    ),
    "gpt_oss": Recipe(
        make_config(
            "gpt_oss",
            max_position_embeddings=131_072,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            num_key_value_heads=1,
            head_dim=12,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        matters=(
            {"sliding_window": 7},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {"rope_parameters": rope(150_000.0)},
            {"swiglu_limit": 70.0},
        ),
        mxfp4=True,
    ),
    "gemma3_text": Recipe(
        make_config(
            "gemma3_text",
            num_hidden_layers=6,
            intermediate_size=24,
            head_dim=12,
            query_pre_attn_scalar=12,
            sliding_window=6,
            rope_parameters=GEMMA_3,
            final_logit_softcapping=2.0,
        ),
        matters=(
            {"sliding_window": 7},
            {"final_logit_softcapping": None},
            {"rope_parameters": {**GEMMA_3, "full_attention": rope(1_000_000.0)}},
            {"rope_parameters": {**GEMMA_3, "sliding_attention": rope(1000.0)}},
        ),
        embedding_scale=0.1,
    ),
    "qwen3_5": Recipe(with_images("qwen3_5", QWEN_3_5, QWEN_VISION), images=True),
    "qwen3_5_moe": Recipe(
        with_images(
            "qwen3_5_moe",
            make_config(
                "qwen3_5_moe_text",
                tie_word_embeddings=True,
                shared_expert_intermediate_size=24,
                **EXPERTS,
                **LINEAR,
            ),
            QWEN_VISION,
        ),
        images=True,
    ),
    "gemma4_text": Recipe(
        make_config(
            "gemma4_text",
            num_hidden_layers=6,
            intermediate_size=24,
            layer_types=2 * GEMMA_4_LAYERS,
            sliding_window=6,
            head_dim=8,
            **GEMMA_4_HEADS,
            num_key_value_heads=1,
            num_kv_shared_layers=3,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY_SIZE,
            use_double_wide_mlp=True,
            final_logit_softcapping=2.0,
        ),
        matters=(
            {"sliding_window": 7},
            {"final_logit_softcapping": None},
        ),
        saved=GEMMA_4_HEADS,
        embedding_scale=0.1,
        scales={"layer_scalar": 0.8, "q_norm": 0.4},
    ),
    "gemma4_moe": Recipe(
        make_config(
            "gemma4_text",
            intermediate_size=24,
            layer_types=GEMMA_4_LAYERS,
            sliding_window=6,
            head_dim=8,
            **GEMMA_4_HEADS,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
        ),
        matters=({"sliding_window": 7}, {"top_k_experts": 1}),
        saved={**GEMMA_4_HEADS, "num_global_key_value_heads": 1},
        embedding_scale=0.1,
        scales={"layer_scalar": 0.8, "q_norm": 0.4},
    ),
    "gemma3n_text": Recipe(
        make_config(
            "gemma3n_text",
            num_hidden_layers=5,
            intermediate_size=24,
            layer_types=[*2 * ["sliding_attention", "full_attention"], "sliding_attention"],
            sliding_window=6,
            head_dim=8,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY_SIZE - 8,
            altup_num_inputs=3,
            laurel_rank=4,
            activation_sparsity_pattern=[0.9, 0.6, 0.0, 0.0, 0.0],
            final_logit_softcapping=2.0,
        ),
        matters=(
            {"sliding_window": 7},
            {"final_logit_softcapping": 3.0},
            {"activation_sparsity_pattern": 5 * [0.0]},
            {"altup_correct_scale": False},
        ),
        embedding_scale=0.1,
        scales={"q_norm": 0.4},
    ),
}
