"""Qwen 3 MoE: Qwen 3 with mixtures of experts in some blocks or all.

The mixture is that of Qwen 2 MoE without a shared expert. The norms of queries and keys have an
epsilon of 1e-6 whatever the backbone says.

KerasHub applies a window only where attention is not fused. On JAX it always is, so there the
backbone attends to the whole text whatever `sliding_window_size` says, and so does the opened
graph. Released models use none.
"""

from keras_hub.src.models.qwen3_moe.qwen3_moe_decoder import (
    Qwen3MoeTransformerDecoder,
    compute_load_balancing_loss,
)
from keras_hub.src.models.qwen3_moe.qwen3_moe_layernorm import Qwen3MoeLayerNorm
from keras_hub.src.utils.keras_utils import fused_attention_op_available

from backbone_surgery.families.llama_block import open_llama_block
from backbone_surgery.families.qwen_mixture import open_qwen_mlp
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    attention = block._self_attention_layer
    window_size = None if fused_attention_op_available() else block.sliding_window_size
    return open_llama_block(
        block,
        hidden_states,
        padding_mask,
        positions,
        mlp=lambda x: open_qwen_mlp(block.mlp, x, padding_mask, compute_load_balancing_loss),
        query_norm=attention._query_dense_layer_norm,
        key_norm=attention._key_dense_layer_norm,
        sliding_window_size=window_size or None,
    )


FAMILY = Family(
    name="qwen3_moe",
    block=Qwen3MoeTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Qwen3MoeLayerNorm,),
    sampler="top_k",
    model_types=("qwen3_moe", "qwen3moe"),
)
