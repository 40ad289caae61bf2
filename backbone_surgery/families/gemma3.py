"""Gemma 3, and the text-only view of one with images: norms of queries and keys, local and global.

Five local blocks, with a window and a short rotary wavelength, come before each global one. All of
it is read off the block being opened. `query_head_dim_normalize=False`, which Gemma 3 27B needs,
does not reach the attention in KerasHub, and so has no effect here; opening warns of it. In float16
KerasHub clips the stream and adds in float32: such a backbone is refused, as is one whose tokens
attend to later ones (EmbeddingGemma).

KerasHub's own task, used on a text without a preprocessor, needs zero `images` among its inputs;
here `token_ids` and `padding_mask` are enough. That task fails with beam search, which works here.
"""

from keras_hub.src.models.gemma3.gemma3_decoder_block import Gemma3DecoderBlock
from keras_hub.src.models.gemma3.gemma3_layers import Gemma3InterleaveEmbeddings, RMSNormalization

from backbone_surgery.families.gemma_block import open_gemma_block, refuse_gemma_block
from backbone_surgery.families.pre_norm import rotary
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    layer, norms = block.attention, {}
    if layer.use_query_key_norm:
        norms = {"query_norm": layer.query_norm, "key_norm": layer.key_norm}
    rotate = rotary(layer.rope_layer, positions)
    return open_gemma_block(block, hidden_states, padding_mask, rotate, **norms)


FAMILY = Family(
    name="gemma3",
    block=Gemma3DecoderBlock,
    open_block=open_block,
    pointwise_layers=(RMSNormalization,),
    refuse=refuse_gemma_block,
    ignored=("vision_mask",),
    images=Gemma3InterleaveEmbeddings,
    stop_tokens=("<end_of_turn>",),
    model_types=("gemma3", "gemma3_text"),
)
