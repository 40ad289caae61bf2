"""The block of Llama, Mistral, Qwen 2 and Qwen 3: pre-norms, rotary positions, a gated MLP."""

from functools import partial
from typing import Any

from backbone_surgery.families.pre_norm import attend, mlp_of, pre_norm, rotary
from backbone_surgery.opening.site import Site


def open_llama_block(
    block: Any, x: Any, padding_mask: Any, positions: Any, mlp: Any = None, **settings: Any
) -> Any:
    """Spell out one block, perhaps with another MLP; the settings are those of `attend`."""
    layer, policy = block._self_attention_layer, block.dtype_policy

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=layer._query_dense,
            key=layer._key_dense,
            value=layer._value_dense,
            output=layer._output_dense,
            scale=layer._inv_norm_factor,
            policy=policy,
            rotate=rotary(layer.rotary_embedding_layer, positions),
            mixed_dropout=layer._dropout_layer,
            **settings,
        )
        return block._self_attention_dropout(Site("attention_output")(x))

    return pre_norm(
        x,
        block._self_attention_layernorm,
        attention,
        block._feedforward_layernorm,
        mlp or partial(mlp_of, block),
        policy,
    )
