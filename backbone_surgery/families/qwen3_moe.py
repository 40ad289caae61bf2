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

from backbone_surgery.families.qwen3_block import open_qwen3_block
from backbone_surgery.families.qwen_mixture import open_qwen_mlp
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""

    def mlp(x):
        return open_qwen_mlp(block.mlp, x, padding_mask, compute_load_balancing_loss)

    return open_qwen3_block(block, hidden_states, padding_mask, positions, mlp)


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
