"""Log-probabilities as OpenAI's clients read them, of the tokens that a choice shows."""

import itertools
from typing import Any

import numpy as np

from backbone_surgery.generation.prompts import to_text
from backbone_surgery.serving.request import EngineRequest

_LEAST = -9999.0
"""In the place of minus infinity, which JSON does not have; OpenAI's own."""

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"

_CONTEXT = 8
"""Tokens that tell whether a space comes with the next one: special ones alone have no text."""


class ShownLogprobs:
    """The log-probabilities of one choice, piece by piece.

    Args:
        request: that asked for them.
        count: how many of the likeliest tokens to show beside each token.
        is_chat: which of OpenAI's two forms to give.
    """

    def __init__(self, request: EngineRequest, count: int, is_chat: bool) -> None:
        self._request, self._preprocessor = request, request.preprocessor
        self._count, self._is_chat = count, is_chat
        self._shown, self._end = 0, 0

    def next(self, visible: int) -> dict[str, Any]:
        """Return those of the next tokens: all that begin within some characters of the text."""
        notes = self._request.logprobs
        whole = self._request.added_text()
        entries, starts = [], []
        while self._shown < len(notes.token_ids):
            i, start = self._shown, self._end
            text = _common(self._request.added_text(i + 1), whole)
            if len(text) <= start and text.endswith(_NO_CHARACTER):
                start -= 1  # one more of the bytes before it, which make no character together
            if start >= visible:
                break
            starts.append(start)
            entries.append(self._entry(i, notes))
            self._end = max(self._end, len(text))
            self._shown += 1
        if self._is_chat:
            return {"content": entries, "refusal": None}
        tops = [{e["token"]: e["logprob"] for e in entry["top_logprobs"]} for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {entry["token"]: entry["logprob"], **top}
                for entry, top in zip(entries, tops, strict=True)
            ],
            "text_offset": starts,
        }

    def _entry(self, index: int, notes: Any) -> dict[str, Any]:
        likeliest = notes.likeliest_ids[index, : self._count]
        before = np.append(self._request.prompt_token_ids, notes.token_ids[:index])[-_CONTEXT:]
        own, *texts = self._texts(before, [notes.token_ids[index], *likeliest])
        others = zip(texts, notes.likeliest_logprobs[index], strict=False)
        return {
            **_shown(own, notes.logprobs[index]),
            "top_logprobs": [_shown(text, logprob) for text, logprob in others],
        }

    def _texts(self, before: np.ndarray, token_ids: list[int]) -> list[str]:
        """Return the text that each token adds to those before, or has alone."""
        alone = [np.array([i]) for i in token_ids]
        after = [np.append(before, i) for i in token_ids]
        start, *texts = to_text([before, *after, *alone], self._preprocessor)
        after_and_alone = zip(texts[: len(token_ids)], texts[len(token_ids) :], strict=True)
        return [t[len(start) :] if t.startswith(start) else own for t, own in after_and_alone]


def _common(text: str, whole: str) -> str:
    """Return what two texts begin with: a character that is not whole in one is another there."""
    pairs = zip(text, whole, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shown(text: str, logprob: float) -> dict[str, Any]:
    is_whole = _NO_CHARACTER not in text
    return {
        "token": text,
        "logprob": max(float(logprob), _LEAST),
        "bytes": list(text.encode()) if is_whole else None,
    }
