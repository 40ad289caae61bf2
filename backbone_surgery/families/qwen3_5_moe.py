"""Qwen 3.5 MoE: Qwen 3.5 with a mixture of experts in each block.

Beside the mixture stands an expert that all tokens share: an MLP, times the sigmoid of a gate. Its
hidden features are the site `mlp_hidden`. In training each mixture adds KerasHub's loss that
balances the load of the experts.

What the family of Qwen 3.5 says of images, windows and KerasHub's own task is so here too.
"""

from functools import partial

from keras import ops
from keras_hub.src.models.qwen3_5.qwen3_5_layers import (
    Qwen3_5InterleaveEmbeddings,
    Qwen3_5LayerNorm,
    Qwen3_5RMSNormGated,
)
from keras_hub.src.models.qwen3_5_moe.qwen3_5_moe_decoder import (
    Qwen3_5MoeTransformerDecoder,
    compute_load_balancing_loss,
)

from backbone_surgery.families.mixtures import gated, mixture
from backbone_surgery.families.pre_norm import gated_mlp
from backbone_surgery.families.qwen3_5_block import open_qwen3_5_block
from backbone_surgery.families.qwen_mixture import FUSED, add_shared, fused_expert
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""

    def mlp(x):
        return mixed_mlp(block.mlp, x, padding_mask)

    return open_qwen3_5_block(block, hidden_states, padding_mask, positions, mlp)


def mixed_mlp(layer, x, padding_mask):
    """Spell out the mixture of a block, and the expert that stands beside it."""
    shared, policy = layer.shared_expert, layer.dtype_policy

    def loss(logits, padding_mask):
        count, chosen = layer.num_experts, layer.top_k
        return layer.router_aux_loss_coefficient * compute_load_balancing_loss(
            logits, count, chosen, padding_mask
        )

    mixed = mixture(
        x,
        layer._router_gate(x),
        padding_mask,
        bank=layer.expert_bank,
        expert=fused_expert(gated(ops.silu, upcast=True)),
        shared=FUSED,
        top_k=layer.top_k,
        policy=policy,
        loss=loss,
    )

    add = partial(add_shared, x, mixed, shared, layer._shared_expert_gate)
    gate, up = shared._feedforward_gate_dense, shared._feedforward_intermediate_dense
    return gated_mlp(x, gate, up, add, ops.silu, policy)


FAMILY = Family(
    name="qwen3_5_moe",
    block=Qwen3_5MoeTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Qwen3_5LayerNorm, Qwen3_5RMSNormGated),
    images=Qwen3_5InterleaveEmbeddings,
    sampler="top_k",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe"),
)
