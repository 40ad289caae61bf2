"""The MLP of Qwen 2 MoE and Qwen 3 MoE, or their mixture of experts and the one beside it."""

from keras import activations, layers, ops

from backbone_surgery.families.mixtures import gated, halves, mixture
from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.families.pre_norm import gated_mlp
from backbone_surgery.opening.site import Site

FUSED = {"_expert_feedforward_gate_dense": None, "_expert_feedforward_output_dense": 1}
"""In the other kernel gate and up stand side by side: a share of what it makes would be gates alone
or what is multiplied with them alone."""


def open_qwen_mlp(layer, x, padding_mask, balance):
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
