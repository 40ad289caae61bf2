"""Mixtral: Llama with a window and a mixture of experts.

The softmax over all experts is in the compute dtype, and the weights of the chosen ones are made to
sum to one. In training each block adds KerasHub's loss that balances the load of the experts.

KerasHub fails in training where `router_jitter_noise` is not zero, so such a backbone is refused.
"""

from keras_hub.src.models.mixtral.mixtral_decoder import (
    MixtralTransformerDecoder,
    compute_load_balancing_loss,
)
from keras_hub.src.models.mixtral.mixtral_layer_norm import MixtralLayerNormalization

from backbone_surgery.families.mixtures import gated, mixture, refuse_router_logits
from backbone_surgery.families.pre_norm import attend, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block._self_attention_layer, block.dtype_policy

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer.query_dense,
            key=layer.key_dense,
            value=layer.value_dense,
            output=layer.output_dense,
            scale=layer._inv_norm_factor,
            policy=policy,
            rotate=rotary(layer.rotary_embedding_layer, positions),
            mixed_dropout=layer.dropout_layer,
            sliding_window_size=block.sliding_window,
        )
        return block._self_attention_dropout(Site("attention_output")(x))

    return pre_norm(
        hidden_states,
        block._self_attention_layernorm,
        attention,
        block._feedforward_layernorm,
        lambda x: _mlp(block._sparse_moe_block, x, padding_mask, policy),
        policy,
    )


_SHARED = {
    "_expert_feedforward_gate_dense": 2,
    "_expert_feedforward_intermediate_dense": 2,
    "_expert_feedforward_output_dense": 1,
}


def _mlp(layer, x, padding_mask, policy):
    product = gated(layer.expert_bank.activation, upcast=True)

    def expert(x, experts):
        gate = experts.project(x, "_expert_feedforward_gate_dense")
        up = experts.project(x, "_expert_feedforward_intermediate_dense")
        return experts.project(product(gate, up), "_expert_feedforward_output_dense")

    def loss(logits, padding_mask):
        balance = compute_load_balancing_loss(logits, layer.num_experts, layer.top_k, padding_mask)
        return layer.router_aux_loss_coef * balance

    logits = layer._sparse_feedforward_gate_dense(x)
    settings = {"bank": layer.expert_bank, "expert": expert, "top_k": layer.top_k, "loss": loss}
    return Site("mlp_output")(
        mixture(x, logits, padding_mask, policy=policy, shared=_SHARED, **settings)
    )


def _refuse(block):
    if block.router_jitter_noise:
        return (
            "a block that KerasHub can train. Received one with `router_jitter_noise`, where "
            "KerasHub fails. Make the backbone with `router_jitter_noise=0`"
        )
    return refuse_router_logits(block)


FAMILY = Family(
    name="mixtral",
    block=MixtralTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(MixtralLayerNormalization,),
    refuse=_refuse,
    sampler="top_k",
    model_types=("mixtral", "llama"),
)
