"""Falcon as KerasHub has it, of RefinedWeb 1B: ALiBi, which is scaled as the scores are.

KerasHub has neither the parallel block nor the rotary positions of the larger models, and cannot
load the checkpoints of Hugging Face. `layer_norm_epsilon` does not reach the blocks there, which
take 1e-5; neither does it here. The head is tied.
"""

from keras_hub.src.models.falcon.falcon_transformer_decoder import FalconTransformerDecoder

from backbone_surgery.families.parts import JoinHeads
from backbone_surgery.families.pre_norm import attend, pre_norm
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block.attention_layer, block.dtype_policy
    join = JoinHeads(dtype=policy, name="join_heads")
    slopes = block._get_slopes(layer.num_heads)

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer.query_dense,
            key=layer.key_dense,
            value=layer.value_dense,
            output=lambda heads: layer.output_dense(join(heads)),
            scale=layer.inv_norm_factor,
            policy=policy,
            alibi_slopes=tuple(slope * layer.inv_norm_factor for slope in slopes),
            dropout=layer.attention_dropout if layer.attention_dropout_rate > 0 else None,
        )
        return block.attention_dropout(Site("attention_output")(x))

    def mlp(x):
        x = Site("mlp_hidden")(block.dense_h_to_4h(x))
        return block.feedforward_dropout(Site("mlp_output")(block.dense_4h_to_h(x)))

    return pre_norm(
        hidden_states,
        block.input_layernorm,
        attention,
        block.post_attention_layernorm,
        mlp,
        policy,
    )


FAMILY = Family(
    name="falcon",
    block=FalconTransformerDecoder,
    open_block=open_block,
    hidden_states="inputs",
    padding_mask="decoder_padding_mask",
    sampler="top_k",
    model_types=("falcon",),
)
