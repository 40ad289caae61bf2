"""Qwen 2 and 2.5: Llama with biases of the projections, and perhaps a window.

KerasHub applies a window only where attention is not fused. On JAX it always is, so there the
backbone attends to the whole text whatever `use_sliding_window_attention` says, and so does the
opened graph. On other backends every block has the window. In Hugging Face only blocks from
`max_window_layers` on have it; released Qwen 2.5 models use none.
"""

from keras_hub.src.models.qwen.qwen_decoder import QwenTransformerDecoder
from keras_hub.src.models.qwen.qwen_layernorm import QwenLayerNorm

from backbone_surgery.families.llama_block import open_llama_block
from backbone_surgery.families.pre_norm import unfused
from backbone_surgery.opening.family import Family


def open_block(block, hidden_states, padding_mask, positions):
    """Spell out one block."""
    window = block.sliding_window_size if block.use_sliding_window_attention else None
    return open_llama_block(
        block,
        hidden_states,
        padding_mask,
        positions,
        sliding_window_size=unfused(window),
    )


FAMILY = Family(
    name="qwen2",
    block=QwenTransformerDecoder,
    open_block=open_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(QwenLayerNorm,),
    sampler="top_k",
    model_types=("qwen2",),
)
