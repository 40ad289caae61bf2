"""Qwen 3.5: three blocks of linear attention (Gated DeltaNet) to one of full attention.

Full attention has norms of queries and keys, rotates a part of each head, and gates what each head
gives. Linear attention keeps a state of one size: see `opening/recurrence.py`.

Of a backbone with a vision encoder the text alone is opened. KerasHub applies the window of full
attention only where attention is not fused. On JAX it always is, so there the backbone attends to
the whole text, and so does the opened graph. Hugging Face has no window.

KerasHub's own task does not generate what its backbone computes: its first pass runs over the
padding after the prompts, where the state goes on decaying, and the last token of a prompt is run
twice. Here each token is run once, and padding leaves the state as it is. So the outputs at padding
after a text are others than KerasHub's; leave them out of losses, as KerasHub's preprocessors do.
"""

from keras_hub.src.models.qwen3_5.qwen3_5_decoder import Qwen3_5TransformerDecoder
from keras_hub.src.models.qwen3_5.qwen3_5_layers import (
    Qwen3_5InterleaveEmbeddings,
    Qwen3_5LayerNorm,
    Qwen3_5RMSNormGated,
)
from keras_hub.src.utils.keras_utils import fused_attention_op_available

from backbone_surgery.families.gated_delta_net import gated, linear_attention
from backbone_surgery.families.parts import PartialRotary, Split
from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def full_attention(layer, x, padding_mask, positions, policy):
    """Spell out attention, from its input to its output projection."""
    size, rotary = layer.head_dim, layer.rotary_embedding_layer
    split = Split(size, dtype=policy, name="query_and_gate")
    query, gate = split(layer._query_dense(x))

    def rotate(heads, name):
        if layer.rotary_dim == size:
            return rotary(heads, positions=positions)
        return PartialRotary(rotary, layer.rotary_dim, dtype=policy, name=name)(heads, positions)

    return attend(
        x,
        padding_mask,
        query=lambda _: query,
        key=layer._key_dense,
        value=layer._value_dense,
        output=layer._output_dense,
        scale=layer._inv_norm_factor,
        policy=policy,
        query_norm=layer._query_norm,
        key_norm=layer._key_norm,
        rotate=rotate,
        mixed_dropout=layer._dropout_layer,
        gate=lambda x: gated(x, gate, "sigmoid", policy),
        sliding_window_size=None if fused_attention_op_available() else layer.sliding_window_size,
    )


def open_block(block, hidden_states, padding_mask, positions, mlp=None):
    """Spell out one block; `mlp` is for blocks that have another one."""
    policy = block.dtype_policy

    def attention(x):
        if block.layer_type == "linear_attention":
            x = linear_attention(block._linear_attn, x, padding_mask, policy)
        else:
            x = full_attention(block._self_attention_layer, x, padding_mask, positions, policy)
        return block._self_attention_dropout(Site("attention_output")(x))

    def own_mlp(x):
        return gated_mlp(
            x,
            block._feedforward_gate_dense,
            block._feedforward_intermediate_dense,
            block._feedforward_output_dense,
            block.activation,
            policy,
        )

    return pre_norm(
        hidden_states,
        block._input_layernorm,
        attention,
        block._post_attention_layernorm,
        own_mlp if mlp is None else mlp,
        policy,
    )


FAMILY = Family(
    name="qwen3_5",
    block=Qwen3_5TransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Qwen3_5LayerNorm, Qwen3_5RMSNormGated),
    images=Qwen3_5InterleaveEmbeddings,
    sampler="top_k",
    model_types=("qwen3_5", "qwen3_5_text", "qwen35"),
)
