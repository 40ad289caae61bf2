"""Detection: how well a control vector tells two kinds of texts apart, block by block."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import check_count
from backbone_surgery.vectors.activations import check_counted, measure, read_texts
from backbone_surgery.vectors.vector import ControlVector, check_fits


class LargestProjections(keras.layers.Layer):
    """Give how far the hidden states of a row go along some directions, at most, in float32.

    The first token is left out: it stands for no text, and its hidden state is often far larger.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        directions: float32[batch, directions, hidden_dim].

    Returns:
        float32[batch, directions].
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, x, positions, padding_mask, directions):
        """Take the largest over the tokens that count."""
        counted = ops.logical_and(ops.cast(padding_mask, "bool"), positions > 0)[..., None]
        along = ops.matmul(ops.cast(x, "float32"), ops.swapaxes(directions, 1, 2))
        return ops.max(ops.where(counted, along, -np.inf), axis=1)

    def compute_output_spec(self, x, positions, padding_mask, directions):
        """One number for each row and direction."""
        return keras.KerasTensor(directions.shape[:2], "float32")


def score_detection(
    lm: Any,
    vector: ControlVector,
    positives: Iterable[Any],
    negatives: Iterable[Any],
    batch_size: int = 32,
    controls: Mapping[str, Any] | None = None,
) -> dict[int, float]:
    """Score how well a vector tells texts that have an attribute from texts that lack it.

    A text counts as far as its hidden states go along the direction, at the token where they go
    furthest, the first token left out. The score is the area under the ROC curve (AUROC): the
    chance that a text with the attribute counts more than one without; 0.5 is guessing.

    Source: the detection task of AxBench, Wu et al. 2025, arXiv:2501.17148.

    Args:
        lm: a `CachedCausalLM`.
        vector: the control vector.
        positives: texts that have the attribute; sequences of token ids for a model without a
            preprocessor.
        negatives: texts that lack it.
        batch_size: how many texts to run at once.
        controls: values for the controls of the model, as of `generate`.

    Returns:
        `{block: AUROC}` for each block that the vector has a direction for.

    Raises:
        SurgeryError: no texts, texts of one token, or a vector for another model.
    """
    check_count("score_detection", "batch_size", batch_size, "texts")
    if not isinstance(vector, ControlVector):
        raise SurgeryError(
            f"score_detection: expected a ControlVector. Received {shown(vector)}. Train one by "
            "`ControlVector.train`, or load one."
        )
    first, second = (read_texts(lm, texts, "score_detection") for texts in (positives, negatives))
    along = largest_projections(lm, vector, [*first, *second], batch_size, controls)
    return {block: auroc(x[: len(first)], x[len(first) :]) for block, x in along.items()}


def largest_projections(
    lm: Any,
    vector: ControlVector,
    rows: list[np.ndarray],
    batch_size: int = 32,
    controls: Mapping[str, Any] | None = None,
) -> dict[int, np.ndarray]:
    """Return how far the hidden states of each text go along a vector, at most, block by block.

    Args:
        lm: a `CachedCausalLM`.
        vector: the control vector.
        rows: the token ids of each text, start token included.
        batch_size: how many texts to run at once.
        controls: values for the controls of the model.

    Returns:
        `{block: float32[texts]}`.
    """
    check_counted(rows, "score_detection")
    check_fits(lm, vector, "score_detection")
    measured = measure(
        lm,
        rows,
        LargestProjections,
        "score_detection",
        asked=(np.stack(list(vector.directions.values()))[None],),
        batch_size=batch_size,
        controls=controls,
    )
    return {block: measured[f"blocks.{block}"][:, i] for i, block in enumerate(vector.directions)}


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the chance that one of the first numbers is larger than one of the second."""
    larger = positive[:, None] > negative
    equal = positive[:, None] == negative
    return float(larger.mean() + equal.mean() / 2)
