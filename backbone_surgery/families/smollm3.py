"""SmolLM3: Llama in which some blocks rotate nothing and so know no positions.

The backbone's `dtype` does not reach its layers in KerasHub, which take the global policy, and
`attention_dropout` has no effect; neither has it here. The output projection has no bias there,
unlike in Hugging Face with `attention_bias=True`. The head is tied.

`enable_lora` finds no layers by itself: pass `target_layer_names=["q_proj", "v_proj"]`. Quantising
fails, since KerasHub never builds the layer that rotates.
"""

import keras
import keras_hub
from keras import ops
from keras_hub.src.models.smollm3.smollm3_layers import SmolLM3DecoderLayer

from backbone_surgery.families.parts import SplitHeads
from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


class SmolLM3Rotary(keras_hub.layers.RotaryEmbedding):
    """Rotate heads by given positions, which the block's own layer does not take.

    Args:
        rotary: the block's own layer, whose frequencies are a weight.
    """

    def __init__(self, rotary, **kwargs):
        super().__init__(**kwargs)
        self.rotary = rotary

    def _get_inverse_freq(self, rotary_dim):
        return ops.cast(self.rotary.inv_freq, "float32")


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, mlp = block.self_attn, block.mlp
    policy = block.dtype_policy
    rotating = SmolLM3Rotary(layer.rotary_embedding, dtype=policy, name="rotary")

    def heads(projection):
        split = SplitHeads(layer.head_dim, dtype=policy, name=f"{projection.name}_heads")
        return lambda x: split(projection(x))

    def attention(x):
        x = attend(
            x,
            padding_mask,
            query=heads(layer.q_proj),
            key=heads(layer.k_proj),
            value=heads(layer.v_proj),
            output=layer.o_proj,
            scale=layer._inv_norm_factor,
            policy=policy,
            rotate=rotary(rotating, positions) if layer.use_rope else None,
        )
        return Site("attention_output")(x)

    def gated(x):
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        return gated_mlp(x, gate, up, down, keras.activations.silu, policy, upcast=False)

    return pre_norm(
        hidden_states,
        block.input_layernorm,
        attention,
        block.post_attention_layernorm,
        gated,
        policy,
    )


FAMILY = Family(
    name="smollm3",
    block=SmolLM3DecoderLayer,
    open_block=open_block,
    hidden_states="hidden_states",
    padding_mask="decoder_padding_mask",
    ignored=("kwargs",),  # the backbone hands its own options on
    sampler="top_k",
    model_types=("smollm3",),
)
