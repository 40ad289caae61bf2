"""The MLP of Gemma 4, and the mixture of experts beside it in the 26B model.

The router reads the stream before the norm. MLP and mixture are normed, added and normed again.
"""

from keras import layers
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.mixtures import gated, mixture
from backbone_surgery.families.parts import Scaled
from backbone_surgery.families.pre_norm import gated_mlp
from backbone_surgery.opening.site import Site


def gemma4_mlp(block, residual, padding_mask):
    """Spell out what is added to the stream after attention.

    Args:
        block: a decoder block of Gemma 4.
        residual: float[batch, time, hidden_dim].
        padding_mask: int[batch, time].
    """
    policy = block.dtype_policy

    def down(x):
        x = block.ffw_linear(x)
        if block.enable_moe_block:
            x = block.post_ffw_norm_dense(x)
            made = _experts(block, residual, padding_mask)
            x = layers.Add(dtype=policy, name="mlp_and_experts")([x, made])
        return block.post_ffw_norm(x)

    x = Site("mlp_norm")(block.pre_ffw_norm(residual))
    x = gated_mlp(
        x, block.gating_ffw, block.gating_ffw_2, down, gelu_approximate, policy, upcast=False
    )
    return block.feedforward_dropout(x) if block.dropout else x


def _experts(block, residual, padding_mask):
    router, policy = block.moe_router, block.dtype_policy
    product = gated(gelu_approximate, upcast=True)

    def expert(x, experts):
        x = product(experts.project(x, "gate_proj"), experts.project(x, "up_proj"))
        return experts.project(x, "down_proj") * experts.vector("per_expert_scale")[..., None]

    scaled = Scaled(
        router.per_dim_scale, router._scalar_root_size, dtype=policy, name="router_scale"
    )
    made = mixture(
        block.pre_ffw_norm_moe(residual),
        router.proj(scaled(router.rms_norm(residual))),
        padding_mask,
        bank=block.moe_expert_bank,
        expert=expert,
        shared={"gate_proj": 2, "up_proj": 2, "down_proj": 1},
        whole={"per_expert_scale": False},
        top_k=router.num_experts_per_token,
        policy=policy,
        upcast=True,
    )
    return block.post_ffw_norm_moe_path(made)
