"""GPT-2: pre-norm blocks with learned positions, which KerasHub builds of `TransformerDecoder`."""

import keras_hub
from keras_hub.src.utils.keras_utils import gelu_approximate

from backbone_surgery.families.gpt2_block import open_gpt2_block, refuse_gpt2_block
from backbone_surgery.opening.family import Family


def claims(block):
    """Tell whether a `TransformerDecoder` is GPT-2's: KerasHub builds OPT of this class too."""
    return block.activation is gelu_approximate


FAMILY = Family(
    name="gpt2",
    block=keras_hub.layers.TransformerDecoder,
    open_block=open_gpt2_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    claims=claims,
    position_layers=(keras_hub.layers.PositionEmbedding,),
    refuse=refuse_gpt2_block,
    embeddings="embeddings_add",
    sampler="top_k",
    model_types=("gpt2",),
)
