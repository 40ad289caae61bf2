"""Judging: what a text is worth, by the user's judge, and how fluent it is."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.prompts import to_text
from backbone_surgery.generation.stopping import goes_on_at
from backbone_surgery.numbers import read_finite
from backbone_surgery.opening.predict import predict
from backbone_surgery.tuning.learning import losses_of, pack_texts, width_of
from backbone_surgery.vectors.activations import read_texts

Judge = Callable[[list[str]], Sequence[float]]


def ask(judge: Judge, texts: list[str], what: str) -> np.ndarray:
    """Return what a judge says of each text, float64[texts].

    Raises:
        SurgeryError: it says anything but a number from 0 to 1, or a boolean, for each.
    """
    said = judge(texts)
    values = read_finite(_numbers(said))
    fits = values is not None and values.shape == (len(texts),)
    if values is None or not fits or (values < 0).any() or (values > 1).any():
        raise SurgeryError(
            f"tune at '{what}': expected a function of a list of texts that returns a number from "
            f"0 to 1 for each. Received {shown(said)} for {len(texts)} texts. Return one for each."
        )
    return values.astype("float64")


def _numbers(said: Any) -> Any:
    """Return booleans as 0 and 1, alone or among numbers; anything else as it is."""
    if isinstance(said, list | tuple):
        return [float(x) if isinstance(x, bool | np.bool_) else x for x in said]
    is_mask = isinstance(said, np.ndarray) and said.dtype == bool
    return said.astype("float32") if is_mask else said


def added(lm: CachedCausalLM, prompts: list[str], texts: list[str]) -> list[str]:
    """Return what generated texts add to their prompts, a space at the beginning included.

    Many a SentencePiece model leaves that out of a text that is made without its prompt.
    """
    before = to_text(read_texts(lm, prompts, "tune"), lm.preprocessor)
    return [text[goes_on_at(b, text) :] for b, text in zip(before, texts, strict=True)]


def as_judged(fluency: Judge) -> Callable[[list[str], list[str]], np.ndarray]:
    """Return a user's judge of fluency as a function of prompts and texts."""
    return lambda prompts, texts: ask(fluency, texts, "fluency")


class Perplexity:
    """How likely the model itself finds what it wrote under an edit, next to what it writes alone.

    Args:
        lm: the model, unedited.
        batch_size: how many texts to run at once.
    """

    def __init__(self, lm: CachedCausalLM, batch_size: int) -> None:
        self.lm, self.batch_size = lm, batch_size
        self.model = losses_of(lm.opened)

    def losses(self, prompts: list[str], texts: list[str]) -> np.ndarray:
        """Return the mean loss of the tokens of each text after its prompt, in nats.

        An empty text counts as one of random tokens.
        """
        starts = [len(row) for row in read_texts(self.lm, prompts, "tune")]
        whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        rows = read_texts(self.lm, whole, "tune", most=self.lm.max_positions)
        inputs = pack_texts(rows, width_of(self.lm, rows))
        losses = []
        for start in range(0, len(rows), self.batch_size):
            index = np.arange(start, start + self.batch_size) % len(rows)
            part: Any = predict(self.model, {k: x[index] for k, x in inputs.items()})
            losses.append(np.asarray(part))
        joined = np.concatenate(losses)[: len(rows)]
        spans = [(a - 1, len(row) - 1) for a, row in zip(starts, rows, strict=True)]
        random = np.log(self.lm.opened.token_embedding.input_dim)
        means = [
            x[a:b].mean() if a < b else random for x, (a, b) in zip(joined, spans, strict=True)
        ]
        return np.array(means, "float64")
