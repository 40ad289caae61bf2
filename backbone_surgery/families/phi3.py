"""Phi-3: Llama under other names, and perhaps two sets of rotary frequencies ("su").

With `rope_scaling_type="su"`, KerasHub rotates all tokens of a call by other frequencies as soon as
one of them lies beyond `pretraining_sequence_length`. What is in a cache then depends on how the
text was cut, so rows end there: longer ones are refused, unless both sets are the same. KerasHub
has no windows, tied heads and partly rotated heads; `as_in_hugging_face` has what Phi-3 mini and
Phi-4 mini need.
"""

import keras_hub
import numpy as np
from keras import ops
from keras_hub.src.models.phi3.phi3_decoder import Phi3Decoder
from keras_hub.src.models.phi3.phi3_layernorm import Phi3LayerNorm

from backbone_surgery.families.as_in_hugging_face import FirstFeaturesRotary
from backbone_surgery.families.pre_norm import attend, gated_mlp, pre_norm, rotary
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.site import Site


class ShortRotary(keras_hub.layers.RotaryEmbedding):
    """Rotate by the frequencies for short texts; the block's own layer takes no positions of rows.

    Args:
        rotary: the block's own `Phi3SuScaledRotaryEmbedding`.
    """

    def __init__(self, rotary, **kwargs):
        super().__init__(**kwargs)
        self.rotary = rotary

    def _get_inverse_freq(self, rotary_dim):
        factors = ops.convert_to_tensor(self.rotary.inverese_freq_short_factor)
        return self.rotary._get_inverse_freq(rotary_dim) / factors

    def _compute_cos_sin_embedding(self, inputs, start_index=0, positions=None):
        cos, sin = super()._compute_cos_sin_embedding(inputs, start_index, positions)
        factor = self.rotary.embedding_scaling_factor
        return cos * factor, sin * factor


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, policy = block.attention, block.dtype_policy
    rotating, features = layer.rotary_embedding_layer, getattr(block, "rotary_dim", None)
    if isinstance(rotating, FirstFeaturesRotary):
        rotating = rotating.rotary
    if block.rope_scaling_type == "su":
        rotating = ShortRotary(rotating, dtype=policy, name="rotary")

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
            rotate=rotary(rotating, positions, features),
            mixed_dropout=layer.dropout_layer,
            sliding_window_size=getattr(block, "sliding_window", None),
        )
        return block.attention_dropout(Site("attention_output")(x))

    def mlp(x):
        gate, up = block.feedforward_gate_dense, block.feedforward_intermediate_dense
        x = gated_mlp(x, gate, up, block.feedforward_output_dense, block.activation, policy)
        return block.feedforward_dropout(x)

    return pre_norm(
        hidden_states,
        block.pre_attention_layernorm,
        attention,
        block.post_attention_layernorm,
        mlp,
        policy,
    )


def most_positions(block):
    """Return up to where the frequencies for short texts hold."""
    if block.rope_scaling_type != "su":
        return None
    is_same = np.array_equal(block.rope_scaling_short_factor, block.rope_scaling_long_factor)
    return None if is_same else block.pretraining_sequence_length


FAMILY = Family(
    name="phi3",
    block=Phi3Decoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Phi3LayerNorm,),
    most_positions=most_positions,
    stop_tokens=("<|end|>",),
    sampler="top_k",
    model_types=("phi3",),
)
