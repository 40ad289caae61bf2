"""The block of Qwen 3 and Qwen 3 MoE: Llama's, with norms of queries and keys."""

from typing import Any

from backbone_surgery.families.llama_block import open_llama_block
from backbone_surgery.families.pre_norm import unfused


def open_qwen3_block(block: Any, x: Any, padding_mask: Any, positions: Any, mlp: Any = None) -> Any:
    """Spell out one block; `mlp` is for blocks that have another one."""
    attention = block._self_attention_layer
    return open_llama_block(
        block,
        x,
        padding_mask,
        positions,
        mlp=mlp,
        query_norm=attention._query_dense_layer_norm,
        key_norm=attention._key_dense_layer_norm,
        sliding_window_size=unfused(block.sliding_window_size),
    )
