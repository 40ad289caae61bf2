"""Mistral: Llama with a window, and perhaps a head size of its own.

`sliding_window=None` is no window. KerasHub's default is 512 tokens.
"""

from keras_hub.src.models.mistral.mistral_layer_norm import MistralLayerNormalization
from keras_hub.src.models.mistral.mistral_transformer_decoder import MistralTransformerDecoder

from backbone_surgery.families.llama_block import open_llama_block
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    return open_llama_block(
        block,
        hidden_states,
        padding_mask,
        positions,
        sliding_window_size=block.sliding_window,
    )


FAMILY = Family(
    name="mistral",
    block=MistralTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(MistralLayerNormalization,),
    sampler="top_k",
    model_types=("mistral", "llama"),
)
