"""GPT-NeoX: attention and MLP side by side, partly rotated heads, one projection for all three.

KerasHub's own task rotates each query of cached decoding as if it were the first token, and so does
not generate what its backbone computes. Here cached and uncached decoding are the same; both follow
the backbone.

In training, KerasHub drops nothing of what the MLP gives, unlike Hugging Face; neither is anything
dropped here. KerasHub has a tied head and the approximate GELU alone; `as_in_hugging_face` has what
Pythia needs. `enable_lora` finds no layers by itself: pass
`target_layer_names=["query_key_value"]`.
"""

from keras import layers
from keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder import GPTNeoXDecoder

from backbone_surgery.families.parts import JoinHeads, Split
from backbone_surgery.families.pre_norm import attend, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block: x + attention(norm(x)) + mlp(other_norm(x))."""
    layer, policy = block._self_attention_layer, block.dtype_policy
    x = Site("attention_norm")(block._self_attention_layer_norm(hidden_states))
    size = layer.attn_head_size
    split = Split(size, 2 * size, dtype=policy, name="split_projection")
    query, key, value = split(layer._qkv_dense(x))
    join = JoinHeads(dtype=policy, name="join_heads")

    x = attend(
        x,
        padding_mask,
        query=lambda _: query,
        key=lambda _: key,
        value=lambda _: value,
        output=lambda heads: layer._output_dense(join(heads)),
        scale=layer._inv_norm_factor,
        policy=policy,
        rotate=rotary(layer.rotary_embedding_layer, positions, layer.rotary_dim),
        dropout=layer._attn_dropout_layer if layer.dropout > 0 else None,
    )
    attended = block._self_attention_dropout(Site("attention_output")(x))
    x = Site("mlp_norm")(block._feedforward_layer_norm(hidden_states))
    x = Site("mlp_hidden")(block._feedforward_intermediate_dense(x))
    x = Site("mlp_output")(block._feedforward_output_dense(x))
    # Sites run in the order of this sum: those of attention first.
    return layers.Add(dtype=policy, name="residual")([attended, x, hidden_states])


FAMILY = Family(
    name="gpt_neo_x",
    block=GPTNeoXDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    sampler="top_k",
    model_types=("gpt_neox", "gptneox"),
)
