"""Shapes of released models, most with 4 of their blocks, that are measured on accelerators."""

from functools import partial

import keras
import keras_hub

from backbone_surgery import graph

PROMPT = 16
LENGTH = 1024
LENGTHS = {"gpt2": 256}
QUANTISED = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Embedding,
    keras.layers.ReversibleEmbedding,
)


def gpt2():
    """Of the shape of GPT-2 124M."""
    return keras_hub.models.GPT2Backbone(50257, 12, 12, 768, 3072, max_sequence_length=1024)


def gemma2(**sizes):
    """Of the shape of Gemma 2 2B, with 4 of its 26 blocks."""
    shape = {
        "vocabulary_size": 256000,
        "num_layers": 4,
        "num_query_heads": 8,
        "num_key_value_heads": 4,
        "hidden_dim": 2304,
        "intermediate_dim": 18432,
        "head_dim": 256,
    }
    return keras_hub.models.GemmaBackbone(
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        final_logit_soft_cap=30,
        attention_logit_soft_cap=50,
        use_sliding_window_attention=True,
        sliding_window_size=4096,
        **{**shape, **sizes},
    )


def gemma2_32k():
    """Of the same shape, with 32,000 tokens: the blocks are most of what is read."""
    return gemma2(vocabulary_size=32000)


def gemma2_27b(blocks=4):
    """Of the shape of Gemma 2 27B, with 4 of its 46 blocks."""
    return gemma2(
        num_layers=blocks,
        num_query_heads=32,
        num_key_value_heads=16,
        hidden_dim=4608,
        intermediate_dim=73728,
        head_dim=128,
        query_head_dim_normalize=False,
    )


def llama3(**sizes):
    """Of the shape of Llama 3 8B, with 4 of its 32 blocks."""
    shape = {
        "num_layers": 4,
        "num_query_heads": 32,
        "hidden_dim": 4096,
        "intermediate_dim": 14336,
    }
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=128256, num_key_value_heads=8, **{**shape, **sizes}
    )


def llama3_70b(blocks=4):
    """Of the shape of Llama 3 70B, with 4 of its 80 blocks."""
    return llama3(num_layers=blocks, num_query_heads=64, hidden_dim=8192, intermediate_dim=28672)


def qwen3():
    """Of the shape of Qwen 3 8B, with 4 of its 36 blocks."""
    return keras_hub.models.Qwen3Backbone(
        vocabulary_size=151936,
        num_layers=4,
        num_query_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_dim=4096,
        intermediate_dim=12288,
        rope_max_wavelength=1000000,
        tie_word_embeddings=False,
        sliding_window_size=None,
    )


def mixtral():
    """Of the shape of Mixtral 8x7B, with 4 of its 32 blocks."""
    return keras_hub.models.MixtralBackbone(
        vocabulary_size=32000,
        num_layers=4,
        num_query_heads=32,
        num_key_value_heads=8,
        hidden_dim=4096,
        intermediate_dim=14336,
        num_experts=8,
        top_k=2,
        rope_max_wavelength=1000000,
        sliding_window=None,
    )


def qwen3_moe(vocabulary_size=151936, num_layers=4):
    """Of the shape of Qwen 3 MoE 30B, with 4 of its 48 blocks."""
    return keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        num_query_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        hidden_dim=2048,
        intermediate_dim=6144,
        moe_intermediate_dim=768,
        num_experts=128,
        top_k=8,
        rope_max_wavelength=1000000,
        tie_word_embeddings=False,
        sliding_window_size=None,
    )


def gpt_oss(experts=32, **sizes):
    """Of the shape of GPT-OSS 20B, with 4 of its 24 blocks; with 128 experts that of 120B."""
    shape = {"vocabulary_size": 201088, "num_layers": 4}
    return keras_hub.models.GptOssBackbone(
        **{**shape, **sizes},
        num_query_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        hidden_dim=2880,
        intermediate_dim=2880,
        num_experts=experts,
        top_k=4,
        sliding_window=128,
        rope_max_wavelength=150000,
        rope_scaling_factor=32.0,
    )


def gemma4(**sizes):
    """Of the shape of the mixture of Gemma 4 (26B), with 4 of its 30 blocks, one of them global."""
    shape = {"vocabulary_size": 262144, "num_layers": 4, "sliding_window_pattern": 4}
    return keras_hub.models.Gemma4Backbone(
        **{**shape, **sizes},
        image_size=16,
        num_query_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        hidden_dim=2816,
        intermediate_dim=2112,
        sliding_window_size=1024,
        final_logit_soft_cap=30.0,
        enable_moe_block=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_dim=704,
    )


MODELS = {
    "gpt2": (gpt2, keras_hub.models.GPT2CausalLM),
    "gemma2": (gemma2, keras_hub.models.GemmaCausalLM),
    "gemma2_32k": (gemma2_32k, keras_hub.models.GemmaCausalLM),
    "gemma2_27b": (gemma2_27b, keras_hub.models.GemmaCausalLM),
    "gemma2_27b_whole": (partial(gemma2_27b, 46), keras_hub.models.GemmaCausalLM),
    "llama3": (llama3, keras_hub.models.Llama3CausalLM),
    "llama3_70b": (llama3_70b, keras_hub.models.Llama3CausalLM),
    "llama3_70b_whole": (partial(llama3_70b, 80), keras_hub.models.Llama3CausalLM),
    "qwen3": (qwen3, keras_hub.models.Qwen3CausalLM),
    "mixtral": (mixtral, keras_hub.models.MixtralCausalLM),
    "qwen3_moe": (qwen3_moe, keras_hub.models.Qwen3MoeCausalLM),
    "gpt_oss": (gpt_oss, keras_hub.models.GptOssCausalLM),
    "gemma4": (gemma4, keras_hub.models.Gemma4CausalLM),
}


def without_values(name):
    """Make the backbone of a model, whose weights have shapes and no values."""
    with graph.without_values():
        return MODELS[name][0]()


def in_int4(backbone):
    """Make a backbone without values in int4, as its `quantize` would, which takes values.

    The dtypes of its layers say it, as where KerasHub loads a preset. Routers of KerasHub's
    mixtures do not take them.
    """
    policies = keras.dtype_policies.DTypePolicyMap()
    for layer in graph.layers_within(backbone):
        if type(layer) in QUANTISED:
            policies[layer.path] = f"int4/128_from_{layer.dtype_policy.name}"
    with graph.without_values():
        quantised = type(backbone).from_config({**backbone.get_config(), "dtype": policies})
    quantised.token_embedding.inputs_quantizer = None  # a table alone is loaded with one
    return quantised
