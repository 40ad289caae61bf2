"""Qwen 3: Llama with norms of queries and keys, a head size of its own, and perhaps a window.

KerasHub applies a window only where attention is not fused. On JAX it always is, so there the
backbone attends to the whole text whatever `sliding_window_size` says, and so does the opened
graph. On other backends every block has the window. Released models use none.

The norms of queries and keys have an epsilon of 1e-5 in KerasHub, that of the backbone in Hugging
Face (1e-6).
"""

from keras_hub.src.models.qwen3.qwen3_decoder import Qwen3TransformerDecoder
from keras_hub.src.models.qwen3.qwen3_layernorm import Qwen3LayerNorm

from backbone_surgery.families.qwen3_block import open_qwen3_block
from backbone_surgery.opening.family import Family

FAMILY = Family(
    name="qwen3",
    block=Qwen3TransformerDecoder,
    open_block=open_qwen3_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Qwen3LayerNorm,),
    sampler="top_k",
    model_types=("qwen3",),
)
