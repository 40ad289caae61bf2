"""Judging: what a text is worth, by the user's judge, and how fluent it is."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import read_finite
from backbone_surgery.opening.predict import predict
from backbone_surgery.tuning.learning import losses_of, pack_texts
from backbone_surgery.vectors.activations import read_texts

Judge = Callable[[list[str]], Sequence[float]]


def ask(judge: Judge, texts: list[str], what: str) -> np.ndarray:
    """Return what a judge says of each text, float64[texts].

    Raises:
        SurgeryError: it says anything but a number from 0 to 1 for each.
    """
    said = judge(texts)
    values = read_finite(said)
    fits = values is not None and values.shape == (len(texts),)
    if values is None or not fits or (values < 0).any() or (values > 1).any():
        raise SurgeryError(
            f"tune at '{what}': expected a function of a list of texts that returns a number from "
            f"0 to 1 for each. Received {shown(said)} for {len(texts)} texts. Return one for each."
        )
    return values.astype("float64")


class Perplexity:
    """How likely the model itself finds what it wrote under an edit, next to what it writes alone.

    Args:
        lm: the model, unedited.
        batch_size: how many texts to run at once.
    """

    def __init__(self, lm: CachedCausalLM, batch_size: int) -> None:
        self.lm, self.batch_size = lm, batch_size
        self.model = losses_of(lm, ())

    def losses(self, prompts: list[str], texts: list[str]) -> np.ndarray:
        """Return the mean loss of the tokens of each text after its prompt, in nats."""
        starts = [len(row) for row in read_texts(self.lm, prompts, "tune")]
        whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        rows = [row[: self.lm.max_positions] for row in read_texts(self.lm, whole, "tune")]
        inputs = pack_texts(rows)
        losses = []
        for start in range(0, len(rows), self.batch_size):
            index = np.arange(start, start + self.batch_size) % len(rows)
            part: Any = predict(self.model, {k: x[index] for k, x in inputs.items()})
            losses.append(np.asarray(part))
        joined = np.concatenate(losses)[: len(rows)]
        ends = [max(len(row) - 1, 1) for row in rows]
        spans = zip(joined, starts, ends, strict=True)
        return np.array([x[min(a - 1, b - 1) : b].mean() for x, a, b in spans], "float64")
