"""Residual norms: how long hidden states are after each block, on average."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.numbers import check_count
from backbone_surgery.opening import site
from backbone_surgery.vectors.activations import check_counted, check_task, measure, read_texts

_NEUTRAL_TEXTS = (
    "The town lies on the bank of a wide river, between two hills.",
    "She opened the door, looked around the room and sat down by the window.",
    "In the morning the bus comes every ten minutes, later only twice an hour.",
    "He asked what the bread cost, counted his coins and bought two of them.",
    "The book has nine chapters, and the last of them is the longest.",
    "They talked about the weather for a while and then went back to work.",
)
"""What the size of the residual stream is measured on, unless other texts are given."""


class TokenNorms(keras.layers.Layer):
    """Average the norm of the hidden states of each row over its tokens, all but the first.

    The first token draws attention that finds nothing else, and its norm is often far larger.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        tokens: not used.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, x, positions, padding_mask, tokens):
        """Average over the tokens that count."""
        counted = ops.logical_and(ops.cast(padding_mask, "bool"), positions > 0)
        counted = ops.cast(counted, "float32")
        norms = ops.sqrt(ops.sum(ops.square(ops.cast(x, "float32")), axis=-1))
        total = ops.sum(norms * counted, axis=1, keepdims=True)
        return total / ops.sum(counted, axis=1, keepdims=True)

    def compute_output_spec(self, x, positions, padding_mask, tokens):
        """One number for each row."""
        return keras.KerasTensor((x.shape[0], 1), "float32")


def residual_norms(
    lm: Any, texts: Iterable[Any] | None = None, batch_size: int = 32
) -> dict[int, float]:
    """Measure how long the hidden states after each block are on average, `{block: norm}`."""
    check_task(lm, "relative_to")
    check_count("relative_to", "batch_size", batch_size, "texts")
    if texts is None:
        texts = _NEUTRAL_TEXTS if lm.preprocessor is not None else _random_tokens(lm)
    rows = read_texts(lm, texts, "relative_to")
    check_counted(rows, "relative_to")
    norms = measure(lm, rows, TokenNorms, "relative_to", batch_size=batch_size)
    blocks = {block: path for path in norms if (block := site.block_of(path)) is not None}
    return {block: float(norms[path].mean()) for block, path in sorted(blocks.items())}


def _random_tokens(lm: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return list(rng.integers(0, lm.opened.token_embedding.input_dim, (8, 32)))
