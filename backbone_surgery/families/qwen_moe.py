"""Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with mixtures of experts in some blocks or all.

Beside the mixture stands an expert that all tokens share: an MLP, times the sigmoid of a gate. Its
hidden features are the site `mlp_hidden`. Blocks in `mlp_only_layers`, and those that
`decoder_sparse_step` leaves out, have an MLP alone.

In training each mixture adds KerasHub's loss that balances the load of the experts. KerasHub counts
in it all tokens that see a token, so also padding on the right.

KerasHub applies a window on a CPU, and not on a GPU where attention is fused; the opened graph does
likewise. Its own cached decoding fails with a window, and ours does not. `from_preset` of a Hugging
Face folder leaves out `tie_word_embeddings` and `mlp_only_layers`.
"""

from keras_hub.src.models.qwen_moe.qwen_moe_decoder import (
    QwenMoeTransformerDecoder,
    compute_load_balancing_loss,
)
from keras_hub.src.models.qwen_moe.qwen_moe_layernorm import QwenMoeLayerNorm

from backbone_surgery.families.mixtures import refuse_router_logits
from backbone_surgery.families.pre_norm import attend, pre_norm, rotary
from backbone_surgery.families.qwen_mixture import open_qwen_mlp
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block._self_attention_layer, block.dtype_policy
    is_windowed = layer.use_sliding_window_attention and not layer._use_fused_attention_op()

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer.query_dense,
            key=layer.key_dense,
            value=layer.value_dense,
            output=layer._output_dense,
            scale=layer._inv_norm_factor,
            policy=policy,
            rotate=rotary(layer.rotary_embedding_layer, positions),
            mixed_dropout=layer._dropout_layer,
            sliding_window_size=layer.sliding_window_size if is_windowed else None,
        )
        return block._self_attention_dropout(Site("attention_output")(x))

    return pre_norm(
        hidden_states,
        block._self_attention_layernorm,
        attention,
        block._feedforward_layernorm,
        lambda x: open_qwen_mlp(block.mlp, x, padding_mask, compute_load_balancing_loss),
        policy,
    )


FAMILY = Family(
    name="qwen2_moe",
    block=QwenMoeTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(QwenMoeLayerNorm,),
    refuse=refuse_router_logits,
    sampler="top_k",
    model_types=("qwen2_moe", "qwen2moe"),
)
