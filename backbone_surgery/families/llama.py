"""Llama 1 to 3, and what Mistral, Qwen 2 and Qwen 3 have in common with it.

Pre-norms, rotary positions, grouped heads and a gated MLP. `rope_position_scaling_factor` has no
effect in KerasHub, and so none here.
"""

from typing import Any

from keras_hub.src.models.llama.llama_decoder import LlamaTransformerDecoder
from keras_hub.src.models.llama.llama_layernorm import LlamaLayerNorm

from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions, mlp: Any = None, **settings: Any):
    """Spell out one block, perhaps with another MLP; the settings are those of `attend`."""
    layer, policy = block._self_attention_layer, block.dtype_policy

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer._query_dense,
            key=layer._key_dense,
            value=layer._value_dense,
            output=layer._output_dense,
            scale=layer._inv_norm_factor,
            policy=policy,
            rotate=rotary(layer.rotary_embedding_layer, positions),
            mixed_dropout=layer._dropout_layer,
            **settings,
        )
        return block._self_attention_dropout(Site("attention_output")(x))

    def own_mlp(x):
        return gated_mlp(
            x,
            block._feedforward_gate_dense,
            block._feedforward_intermediate_dense,
            block._feedforward_output_dense,
            block.activation,
            policy,
        )

    return pre_norm(
        hidden_states,
        block._self_attention_layernorm,
        attention,
        block._feedforward_layernorm,
        mlp or own_mlp,
        policy,
    )


FAMILY = Family(
    name="llama",
    block=LlamaTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(LlamaLayerNorm,),
    sampler="top_k",
    model_types=("llama",),
)
