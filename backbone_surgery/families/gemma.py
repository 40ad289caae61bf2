"""Gemma 1 and 2: rotary positions, grouped heads, a gated MLP.

Gemma 2 adds post norms, soft caps and a window on every other block. All of it is read off the
block being opened. `query_head_dim_normalize=False`, which Gemma 2 27B needs, does not reach the
attention in KerasHub, and so has no effect here; opening warns of it.
"""

import keras
from keras import layers, ops
from keras_hub.src.models.gemma.gemma_decoder_block import GemmaDecoderBlock
from keras_hub.src.models.gemma.rms_normalization import RMSNormalization

from backbone_surgery.families.gemma_block import open_gemma_block
from backbone_surgery.opening.family import Family


class GemmaRotary(layers.Layer):
    """Rotate heads by position and lay the result out as Gemma does, halves interleaved.

    Args:
        rotary: the block's own `keras_hub.layers.RotaryEmbedding`.

    Call arguments:
        x: float[batch, time, heads, head_dim].
        positions: int32[batch, time].
    """

    def __init__(self, rotary, **kwargs):
        super().__init__(**kwargs)
        self.rotary = rotary

    def call(self, x, positions):
        x = self.rotary(x, positions=positions)
        return ops.reshape(ops.stack(ops.split(x, 2, axis=-1), axis=-1), ops.shape(x))

    def compute_output_spec(self, x, positions):
        return keras.KerasTensor(x.shape, self.compute_dtype)


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""

    def rotate(heads, name):
        layer = GemmaRotary(block.attention.rope_layer, dtype=block.dtype_policy, name=name)
        return layer(heads, positions)

    return open_gemma_block(block, hidden_states, padding_mask, rotate)


FAMILY = Family(
    name="gemma",
    block=GemmaDecoderBlock,
    open_block=open_block,
    pointwise_layers=(RMSNormalization,),
    model_types=("gemma", "gemma2"),
    model_type=lambda block: "gemma2" if block.use_post_ffw_norm else "gemma",
)
