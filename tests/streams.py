"""The family with several streams of hidden states as a row; see `families.py`."""

import keras
import keras_hub

from tests.family_row import VOCABULARY, Row, spread


def make_gemma3n(seed=0, num_layers=2, vocabulary_size=VOCABULARY, **kwargs):
    keras.utils.set_random_seed(seed)
    config = {
        "text_hidden_size": 32,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": [48 + 8 * (i % 2) for i in range(num_layers)],
        "hidden_activation": "gelu_approximate",
        "layer_types": [
            "full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)
        ],
        "sliding_window": 6,
        "rope_theta": 1e6,
        "max_position_embeddings": 64,
        "vocab_size_per_layer_input": vocabulary_size - 7,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 4,
        "laurel_rank": 6,
        "activation_sparsity_pattern": [0.0 if i else 0.6 for i in range(num_layers)],
    }
    backbone = keras_hub.models.Gemma3nBackbone(
        text_vocab_size=vocabulary_size, num_hidden_layers=num_layers, **{**config, **kwargs}
    )
    backbone.num_layers, backbone.hidden_dim = num_layers, 32  # as the others have them
    return spread(backbone, seed)


STREAMS = {
    "gemma3n": Row(
        make_gemma3n,
        keras_hub.models.Gemma3nCausalLM,
        (
            {  # as the published models: the last blocks attend to what earlier ones keep
                "num_layers": 5,
                "num_kv_shared_layers": 2,
                "num_key_value_heads": 1,
                "altup_num_inputs": 2,
                "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.7],
                "final_logit_soft_cap": 3.0,
            },
            {
                "num_key_value_heads": 4,
                "head_dim": 6,
                "sliding_window": 3,
                "altup_num_inputs": 3,
                "altup_correct_scale": False,
                "attention_bias": True,
                "rope_scaling": 4.0,
                "hidden_activation": "silu",
            },
        ),
        layers={
            "attention_norm": "input_layernorm",
            "query": "attention.q_proj",
            "key": "attention.k_proj",
            "value": "attention.v_proj",
            "attention_output": "post_attention_layernorm",
            "laurel_output": "laurel",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_output": "post_feedforward_layernorm",
            "per_layer_output": "post_per_layer_input_norm",
        },
        embeddings="language_model.embed_tokens",
        stream=0,
        lora=("q_proj", "v_proj"),
    ),
}
