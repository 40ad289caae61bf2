"""The MLP of Qwen 2 MoE and Qwen 3 MoE, or their mixture of experts and the one beside it."""

from functools import partial

from keras import activations, layers, ops

from backbone_surgery.families.mixtures import gated, halves, mixture
from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.families.pre_norm import mlp_of
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
        return mlp_of(layer, x)
    mixed = _mixture(layer, x, padding_mask, balance)
    if not hasattr(layer, "shared_expert_dense"):
        return Site("mlp_output")(mixed)
    shared = layer.shared_expert_dense
    beside = partial(add_shared, x, mixed, shared, layer.shared_expert_gate_dense)
    return mlp_of(shared, x, beside)


def add_shared(x, mixed, shared, gate, hidden):
    """Add the expert that all tokens share to a mixture, times the sigmoid of a gate.

    Args:
        x: float[batch, time, hidden_dim].
        mixed: what the mixture gives.
        shared: the MLP that all tokens share.
        gate: its gate.
        hidden: the hidden features of that MLP.
    """
    policy = shared.dtype_policy
    product = GatedProduct(activations.sigmoid, dtype=policy, name="shared_product")
    own = product(gate(x), shared._feedforward_output_dense(hidden))
    return layers.Add(dtype=policy, name="shared_residual")([mixed, own])


def fused_expert(product):
    """Return what an expert computes whose gate and up projection are halves of one kernel."""

    def expert(x, experts):
        gate, up = halves(experts.project(x, "_expert_feedforward_gate_dense"))
        return experts.project(product(gate, up), "_expert_feedforward_output_dense")

    return expert


def _mixture(layer, x, padding_mask, balance):
    expert = fused_expert(gated(layer.expert_bank.activation))

    def loss(logits, padding_mask):
        sees = ops.cumsum(ops.cast(padding_mask, "int32"), axis=1)[..., None] > 0
        return layer.router_aux_loss_coefficient * balance(
            logits, layer.num_experts, layer.top_k, sees
        )

    logits, policy = layer._sparse_feedforward_gate_dense(x), layer.dtype_policy
    choice = {"top_k": layer.top_k, "normalize": layer.norm_top_k_prob, "loss": loss}
    kernels = {"bank": layer.expert_bank, "expert": expert, "shared": FUSED}
    return mixture(x, logits, padding_mask, policy=policy, **kernels, **choice)
