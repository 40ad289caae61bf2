"""Qwen 3.5: three blocks of linear attention (Gated DeltaNet) to one of full attention.

Full attention has norms of queries and keys, rotates a part of each head, and gates what each head
gives. Linear attention keeps a state of one size: see `opening/recurrence.py`.

Of a backbone with a vision encoder the text alone is opened. KerasHub applies the window of full
attention only where attention is not fused. On JAX it always is, so there the backbone attends to
the whole text, and so does the opened graph. Hugging Face has no window.

KerasHub's own task does not generate what its backbone computes: its first pass runs over the
padding after the prompts, where the state goes on decaying, and the last token of a prompt is run
twice. Here each token is run once, and padding leaves the state as it is. So the outputs at padding
after a text are others than KerasHub's; leave them out of losses, as KerasHub's preprocessors do.
"""

from keras_hub.src.models.qwen3_5.qwen3_5_decoder import Qwen3_5TransformerDecoder
from keras_hub.src.models.qwen3_5.qwen3_5_layers import (
    Qwen3_5InterleaveEmbeddings,
    Qwen3_5LayerNorm,
    Qwen3_5RMSNormGated,
)

from backbone_surgery.families.qwen3_5_block import open_qwen3_5_block
from backbone_surgery.opening.family import Family

FAMILY = Family(
    name="qwen3_5",
    block=Qwen3_5TransformerDecoder,
    open_block=open_qwen3_5_block,
    hidden_states="decoder_sequence",
    padding_mask="decoder_padding_mask",
    pointwise_layers=(Qwen3_5LayerNorm, Qwen3_5RMSNormGated),
    images=Qwen3_5InterleaveEmbeddings,
    sampler="top_k",
    model_types=("qwen3_5", "qwen3_5_text", "qwen35"),
)
