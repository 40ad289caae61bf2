"""BLOOM: no positions, but scores that fall with distance (ALiBi).

KerasHub cannot load the checkpoints of Hugging Face. The head is tied.
"""

from keras import layers
from keras_hub.src.models.bloom.bloom_decoder import BloomDecoder
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.parts import JoinHeads, Renamed
from backbone_surgery.families.pre_norm import attend, pre_norm
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block._self_attention_layer, block.dtype_policy
    join = JoinHeads(dtype=policy, name="join_heads")
    gelu = layers.Activation(gelu_approximate, dtype=policy, name="gelu")

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer._query_dense,
            key=layer._key_dense,
            value=layer._value_dense,
            output=lambda heads: layer._output_dense(join(heads)),
            scale=layer.inv_norm_factor,
            policy=policy,
            alibi_slopes=tuple(layer._alibi_layer._get_slopes(layer.num_heads)),
            dropout=layer._dropout_layer if layer.dropout > 0 else None,
        )
        # KerasHub drops out of the pattern and of the output by one layer, named as the block's.
        dropout = Renamed(layer._dropout_layer, name="attention_dropout")
        return dropout(Site("attention_output")(x))

    def mlp(x):
        x = Site("mlp_hidden")(gelu(block._mlp_intermediate_dense(x)))
        return block._dropout_layer(Site("mlp_output")(block._mlp_output_dense(x)))

    return pre_norm(
        hidden_states,
        block._pre_attention_layernorm,
        attention,
        block._post_attention_layernorm,
        mlp,
        policy,
    )


FAMILY = Family(
    name="bloom",
    block=BloomDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    sampler="top_k",
    model_types=("bloom",),
)
