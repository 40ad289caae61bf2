"""Stopping: cut rows at a stop token or at a stop sequence, exactly, by tokens or by text."""

import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.generation.prompts import to_text


@dataclass(frozen=True)
class Stops:
    """What ends a row before its budget does.

    Attributes:
        ids: stop token ids. The stop token stays in the row.
        texts: stop sequences as text. The text is cut right after the first one to be complete.
        sequences: stop sequences as token ids; the row is cut right after.
        preprocessor: makes text of token ids.
    """

    ids: list[int]
    texts: list[str] = field(default_factory=list)
    sequences: list[np.ndarray] = field(default_factory=list)
    preprocessor: Any = None

    @property
    def by_sequence(self) -> bool:
        """Whether rows have to be looked at between the steps of the compiled loop."""
        return bool(self.texts or self.sequences)

    def cut(
        self, prompt: np.ndarray, new: np.ndarray, table: FormatTable | None = None
    ) -> tuple[np.ndarray, bool]:
        """Cut the new tokens of a row where it stops, and tell whether it does.

        Args:
            prompt: int32[length], the tokens before.
            new: int32[tokens], the new ones.
            table: of the response format, if it has one.
        """
        ends = np.flatnonzero(np.isin(new, self.ids))
        end = int(ends[0]) + 1 if len(ends) else len(new)
        stopped = bool(len(ends))
        whole = None if table is None else table.end(new[:end], self.ids)
        if whole is not None:
            end, stopped = whole, True
        for sequence in self.sequences:
            sequence_end = _first_end(new[:end], sequence)
            if sequence_end is not None:
                end, stopped = sequence_end, True
        if self.texts:
            text_end = self._first_text(prompt, new[:end])
            if text_end is not None:
                end, stopped = text_end, True
        return new[:end], stopped

    def render(self, prompt: np.ndarray, new: np.ndarray, strip_prompt: bool = False) -> str:
        """Turn a row into text, cut right after the first stop sequence in its new part."""
        text, start = self._text(prompt, new)
        surplus = len(text) - self._end(text, start)
        shown = to_text([new], self.preprocessor)[0] if strip_prompt else text
        return shown[: len(shown) - surplus]

    def added(self, prompt: np.ndarray, new: np.ndarray) -> str:
        """Return what the new tokens add to the text of the prompt, cut likewise.

        Many a SentencePiece model leaves out the space that a text begins with. So `render` without
        the prompt may begin with the second character of this.
        """
        text, start = self._text(prompt, new)
        return text[start : self._end(text, start)]

    def _end(self, text: str, start: int) -> int:
        """Return where the first stop sequence to be complete ends; else where the text does."""
        ends = [at + len(s) for s in self.texts if (at := text.find(s, start)) >= 0]
        return min(ends, default=len(text))

    def _text(self, prompt: np.ndarray, new: np.ndarray) -> tuple[str, int]:
        """Return the text of a row, and where its new part begins."""
        rows = [prompt, np.concatenate([prompt, new])]
        before, text = to_text(rows, self.preprocessor)
        return text, goes_on_at(before, text)

    def _first_text(self, prompt: np.ndarray, new: np.ndarray) -> int | None:
        """Return the smallest number of new tokens whose text holds a stop sequence."""

        def holds(count: int) -> bool:
            text, start = self._text(prompt, new[:count])
            return any(text.find(s, start) >= 0 for s in self.texts)

        if not holds(len(new)):
            return None
        return bisect.bisect_left(range(len(new)), True, key=holds)


def goes_on_at(before: str, text: str) -> int:
    """Return where a text leaves that of its prompt, which may end in half a character."""
    pairs = zip(before, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(before))


def _first_end(row: np.ndarray, sequence: np.ndarray) -> int | None:
    """Return where the first occurrence of a sequence in a row ends."""
    if len(row) < len(sequence):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(row, len(sequence))
    starts = np.flatnonzero((windows == sequence).all(axis=1))
    return int(starts[0]) + len(sequence) if len(starts) else None
