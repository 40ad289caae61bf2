"""The block of GPT-2 and OPT, which KerasHub builds of `TransformerDecoder`."""

from keras import layers

from backbone_surgery.opening.attention import SelfAttention
from backbone_surgery.opening.site import Site


def open_gpt2_block(block, hidden_states, padding_mask, positions):
    """Spell out one block: x + attention(norm(x)), then x + mlp(norm(x))."""
    attention = block._self_attention_layer
    policy = block.dtype_policy

    x = block._self_attention_layer_norm(hidden_states)
    x = Site("attention_norm")(x)
    query = Site("query")(attention.query_dense(x))
    key = Site("key")(attention.key_dense(x))
    value = Site("value")(attention.value_dense(x))
    x = SelfAttention(
        num_heads=attention.num_heads,
        num_key_value_heads=attention.num_heads,
        head_dim=attention.key_dim,
        scale=attention.key_dim**-0.5,
        dropout=attention._dropout_layer if attention.dropout > 0 else None,
        dtype=policy,
        name="self_attention",
    )(query, key, value, padding_mask)
    x = attention.output_dense(Site("head_outputs")(x))
    x = Site("attention_output")(x)
    x = block._self_attention_dropout(x)
    x = layers.Add(dtype=policy, name="attention_residual")([x, hidden_states])
    residual = Site("residual_mid")(x)

    x = Site("mlp_norm")(block._feedforward_layer_norm(residual))
    x = Site("mlp_hidden")(block._feedforward_intermediate_dense(x))
    x = Site("mlp_output")(block._feedforward_output_dense(x))
    x = block._feedforward_dropout(x)
    return layers.Add(dtype=policy, name="mlp_residual")([x, residual])


def refuse_gpt2_block(block):
    """Say why a `TransformerDecoder` is not such a block, if it is not."""
    if block._cross_attention_layer is not None:
        return "a decoder block without cross-attention. Received one with it. Use a decoder-only"
    if not block.normalize_first:
        return "a pre-norm block. Received `normalize_first=False`. Write a family for it"
    return None
