"""The block of Qwen 3.5, with linear or full attention, and perhaps a mixture of experts."""

from functools import partial

from backbone_surgery.families.gated_delta_net import gated, linear_attention
from backbone_surgery.families.parts import Split
from backbone_surgery.families.pre_norm import attend, mlp_of, pre_norm, rotary, unfused
from backbone_surgery.opening.site import Site


def _full_attention(layer, x, padding_mask, positions, policy):
    """Spell out attention, from its input to its output projection."""
    split = Split(layer.head_dim, dtype=policy, name="query_and_gate")
    query, gate = split(layer._query_dense(x))

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
        rotate=rotary(layer.rotary_embedding_layer, positions, layer.rotary_dim),
        mixed_dropout=layer._dropout_layer,
        gate=lambda x: gated(x, gate, "sigmoid", policy),
        sliding_window_size=unfused(layer.sliding_window_size),
    )


def open_qwen3_5_block(block, hidden_states, padding_mask, positions, mlp=None):
    """Spell out one block; `mlp` is for blocks that have another one."""
    policy = block.dtype_policy

    def attention(x):
        if block.layer_type == "linear_attention":
            x = linear_attention(block._linear_attn, x, padding_mask, policy)
        else:
            x = _full_attention(block._self_attention_layer, x, padding_mask, positions, policy)
        return block._self_attention_dropout(Site("attention_output")(x))

    return pre_norm(
        hidden_states,
        block._input_layernorm,
        attention,
        block._post_attention_layernorm,
        mlp or partial(mlp_of, block),
        policy,
    )
