"""OPT: GPT-2's block with a ReLU, and one layer that embeds both tokens and positions.

KerasHub has the pre-norm models with a tied head alone, so not the 350M model of Hugging Face. Its
token embedding lies inside of the layer `embeddings`.
"""

import keras
import keras_hub

from backbone_surgery.families.gpt2_block import open_gpt2_block, refuse_gpt2_block
from backbone_surgery.opening.family import Family


def claims(block):
    """Tell whether a `TransformerDecoder` is OPT's: KerasHub builds GPT-2 of this class too."""
    return block.activation is keras.activations.relu


FAMILY = Family(
    name="opt",
    block=keras_hub.layers.TransformerDecoder,
    open_block=open_gpt2_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    claims=claims,
    position_layers=(keras_hub.layers.TokenAndPositionEmbedding,),
    refuse=refuse_gpt2_block,
    embeddings="embeddings",
    sampler="top_k",
    model_types=("opt",),
)
