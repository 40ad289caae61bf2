"""GPT-OSS: attention sinks, biases, YaRN positions, a window on every other block, and experts.

The router has a bias, and the softmax is over the logits of the chosen experts. Gate and up
projection of an expert alternate in one kernel; both are clipped.

In KerasHub a token sees one token more than the window says: itself and `sliding_window` before it.
Hugging Face counts the token itself in. The opened graph does as KerasHub does. An odd head size
leaves the last feature of each head unrotated. No loss for the router is added in training.
"""

from keras import ops
from keras_hub.src.models.gpt_oss.gpt_oss_decoder import GptOssTransformerDecoder
from keras_hub.src.models.gpt_oss.gpt_oss_layer_norm import GptOssLayerNormalization

from backbone_surgery.families.mixtures import mixture, refuse_router_logits
from backbone_surgery.families.pre_norm import attend, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block.self_attention_layer, block.dtype_policy

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
            rotate=rotary(layer.rotary_embedding_layer, positions, layer._rotary_dim),
            mixed_dropout=layer.dropout_layer,
            sliding_window_size=block.sliding_window + 1 if block.sliding_window else None,
            sinks=layer,
        )
        return Site("attention_output")(x)

    return pre_norm(
        hidden_states,
        block.input_layernorm,
        attention,
        block.post_attention_layernorm,
        lambda x: _mlp(block.sparse_moe_block, x, padding_mask),
        policy,
    )


def _mlp(layer, x, padding_mask):
    bank = layer.experts

    def expert(x, experts):
        x = experts.project(x, "gate_up_proj") + experts.vector("gate_up_proj_bias")
        gate = ops.minimum(x[..., ::2], bank.limit)
        up = ops.clip(x[..., 1::2], -bank.limit, bank.limit)
        x = (up + 1) * (gate * ops.sigmoid(gate * bank.alpha))
        return experts.project(x, "down_proj") + experts.vector("down_proj_bias")

    logits = layer.router.router_dense(x)
    x = mixture(
        x,
        logits,
        padding_mask,
        bank=bank,
        expert=expert,
        shared={"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1},
        whole={"down_proj_bias": True},
        top_k=layer.top_k,
        policy=layer.dtype_policy,
        chosen_first=True,
    )
    return Site("mlp_output")(x)


FAMILY = Family(
    name="gpt_oss",
    block=GptOssTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(GptOssLayerNormalization,),
    refuse=refuse_router_logits,
    sampler="top_k",
    model_types=("gpt_oss", "gpt-oss"),
)
