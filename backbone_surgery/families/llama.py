"""Llama 1 to 3: pre-norms, rotary positions, grouped heads and a gated MLP.

`rope_position_scaling_factor` has no effect in KerasHub, and so none here.
"""

from keras_hub.src.models.llama.llama_decoder import LlamaTransformerDecoder
from keras_hub.src.models.llama.llama_layernorm import LlamaLayerNorm

from backbone_surgery.families.llama_block import open_llama_block
from backbone_surgery.opening.family import Family

FAMILY = Family(
    name="llama",
    block=LlamaTransformerDecoder,
    open_block=open_llama_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(LlamaLayerNorm,),
    sampler="top_k",
    model_types=("llama",),
)
