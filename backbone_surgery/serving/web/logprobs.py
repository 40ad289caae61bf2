"""Log-probabilities as OpenAI's clients read them, of the tokens that a choice shows."""

import itertools
from typing import Any

import numpy as np

from backbone_surgery.generation.prompts import special_tokens, to_text, token_name
from backbone_surgery.serving.logprobs import TokenLogprobs
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
        first, starts = self._shown, []
        while self._shown < len(notes.token_ids):
            i, start = self._shown, self._end
            text = _common(self._request.added_text(i + 1), whole)
            if len(text) <= start and text.endswith(_NO_CHARACTER):
                start -= 1  # one more of the bytes before it, which make no character together
            if start >= visible:
                break
            starts.append(start)
            self._end = max(self._end, len(text))
            self._shown += 1
        prompt = self._request.prompt_token_ids
        entries = self._entries(prompt, notes, range(first, self._shown))
        if self._is_chat:
            return {"content": entries, "refusal": None}
        return {**_columns(entries), "text_offset": starts}

    def echoed(self, prompt: str, text: str) -> dict[str, Any]:
        """Return those of the prompt, whose first token has none, and of all new tokens.

        Args:
            prompt: as it is echoed.
            text: that is shown after it. If a stop sequence has cut it, so are the new tokens.
        """
        ids = self._request.prompt_token_ids
        notes = self._request.prompt_logprobs
        entries = self._entries(ids[:1], notes, range(len(notes.token_ids)))
        columns = _columns(entries)
        is_cut = text != self._request.added_text()
        new = self.next(len(text) + (not is_cut))  # the last one may have no text
        columns["tokens"].insert(0, self._texts([ids[:0]], [ids[:1]])[0][0])
        for name in ("token_logprobs", "top_logprobs"):
            columns[name].insert(0, None)
        offsets = [len(prompt) + start for start in new["text_offset"]]
        columns = {name: column + new[name] for name, column in columns.items()}
        return {**columns, "text_offset": self._starts(ids, prompt) + offsets}

    def _starts(self, token_ids: np.ndarray, prompt: str) -> list[int]:
        """Return where each token begins in a prompt, as far as its text is found there."""
        tokenizer = self._preprocessor.tokenizer
        special = special_tokens(tokenizer)
        windows = [token_ids[max(0, i - _CONTEXT) : i + 1] for i in range(len(token_ids))]
        rows = [*windows, *(window[:-1] for window in windows)]
        texts = [text.rstrip(_NO_CHARACTER) for text in to_text(rows, self._preprocessor)]
        starts, end = [], 0
        for i, before in enumerate(texts[len(windows) :]):
            piece = texts[i][len(before) :].lstrip(_NO_CHARACTER)
            name = token_name(int(token_ids[i]), tokenizer)
            if not piece and name in special and prompt.startswith(name, end):
                piece = name
            # Skipped are characters that no token gives alone, such as that of a stray byte.
            start = prompt.find(piece, end, end + len(piece) + _CONTEXT)
            starts.append(max(start, end))
            end = starts[-1] + (len(piece) if start >= 0 else 0)
        return starts

    def _entries(
        self, before: np.ndarray, notes: TokenLogprobs, indices: range
    ) -> list[dict[str, Any]]:
        """Return what is shown of some tokens, whose first one of all comes after those before."""
        row = np.append(before, notes.token_ids)
        ends = [len(before) + i for i in indices]
        ids = [[notes.token_ids[i], *notes.likeliest_ids[i, : self._count]] for i in indices]
        texts = self._texts([row[max(0, end - _CONTEXT) : end] for end in ends], ids)
        return [
            {
                **_shown(own, notes.logprobs[i]),
                "top_logprobs": [
                    _shown(text, logprob)
                    for text, logprob in zip(others, notes.likeliest_logprobs[i], strict=False)
                ],
            }
            for i, (own, *others) in zip(indices, texts, strict=True)
        ]

    def _texts(self, befores: list[np.ndarray], token_ids: list[Any]) -> list[list[str]]:
        """Return the text that each of some tokens adds to those before, or has alone."""
        rows: list[np.ndarray] = []
        for before, ids in zip(befores, token_ids, strict=True):
            rows += [before, *(np.append(before, i) for i in ids), *(np.array([i]) for i in ids)]
        texts = iter(to_text(rows, self._preprocessor) if rows else [])
        added = []
        for ids in token_ids:
            start, *others = itertools.islice(texts, 1 + 2 * len(ids))
            pairs = zip(others[: len(ids)], others[len(ids) :], strict=True)
            added.append([x[len(start) :] if x.startswith(start) else own for x, own in pairs])
        return added


def _columns(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return entries as those of completions, which have a list for each thing."""
    tops = [{e["token"]: e["logprob"] for e in entry["top_logprobs"]} for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {entry["token"]: entry["logprob"], **top}
            for entry, top in zip(entries, tops, strict=True)
        ],
    }


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
