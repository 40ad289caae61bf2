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

from keras import activations, layers, ops
from keras_hub.src.models.qwen_moe.qwen_moe_decoder import (
    QwenMoeTransformerDecoder,
    compute_load_balancing_loss,
)
from keras_hub.src.models.qwen_moe.qwen_moe_layernorm import QwenMoeLayerNorm

from backbone_surgery.families.mixtures import gated, halves, mixture, refuse_router_logits
from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site

FUSED = {"_expert_feedforward_gate_dense": None, "_expert_feedforward_output_dense": 1}
"""In the other kernel gate and up stand side by side: a share of what it makes would be gates alone
or what is multiplied with them alone."""


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
        lambda x: mlp(block.mlp, x, padding_mask, compute_load_balancing_loss),
        policy,
    )


def mlp(layer, x, padding_mask, balance):
    """Spell out the MLP of a block, or its mixture and what stands beside it.

    Args:
        layer: the MLP or the mixture.
        x: float[batch, time, hidden_dim].
        padding_mask: int[batch, time].
        balance: KerasHub's loss of the family that balances the load of the experts.
    """
    if not hasattr(layer, "expert_bank"):
        return _dense(layer, x, layer._feedforward_output_dense)
    mixed = _mixture(layer, x, padding_mask, balance)
    if not hasattr(layer, "shared_expert_dense"):
        return Site("mlp_output")(mixed)
    shared, policy = layer.shared_expert_dense, layer.dtype_policy

    def add(hidden):
        gate = GatedProduct(activations.sigmoid, dtype=policy, name="shared_product")
        x_shared = gate(layer.shared_expert_gate_dense(x), shared._feedforward_output_dense(hidden))
        return layers.Add(dtype=policy, name="shared_residual")([mixed, x_shared])

    return _dense(shared, x, add)


def _dense(layer, x, down):
    gate, up = layer._feedforward_gate_dense, layer._feedforward_intermediate_dense
    return gated_mlp(x, gate, up, down, layer.activation, layer.dtype_policy)


def _mixture(layer, x, padding_mask, balance):
    product = gated(layer.expert_bank.activation)

    def expert(x, experts):
        gate, up = halves(experts.project(x, "_expert_feedforward_gate_dense"))
        return experts.project(product(gate, up), "_expert_feedforward_output_dense")

    def loss(logits, padding_mask):
        sees = ops.cumsum(ops.cast(padding_mask, "int32"), axis=1)[..., None] > 0
        return layer.router_aux_loss_coefficient * balance(
            logits, layer.num_experts, layer.top_k, sees
        )

    logits, policy = layer._sparse_feedforward_gate_dense(x), layer.dtype_policy
    choice = {"top_k": layer.top_k, "normalize": layer.norm_top_k_prob, "loss": loss}
    kernels = {"bank": layer.expert_bank, "expert": expert, "shared": FUSED}
    return mixture(x, logits, padding_mask, policy=policy, **kernels, **choice)


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
