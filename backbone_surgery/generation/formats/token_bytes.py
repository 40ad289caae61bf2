"""The bytes of each token of a tokenizer: what it adds to a text."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import keras_hub
import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.prompts import special_tokens, token_name

_MARK = re.compile(r"<\|?[^<>\s|]+\|?>")
"""Tokens that stand for the parts of a chat, say. What they would add as text, others add too."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of the tokens that have some, side by side, the longest token first.

    Args:
        tokens: of each token id, its bytes; `None` for a token without text.

    Attributes:
        size: how many token ids there are.
        ids: int32[tokens], the ids of those with bytes.
    """

    def __init__(self, tokens: list[bytes | None]) -> None:
        self.size = len(tokens)
        known = sorted(((text, i) for i, text in enumerate(tokens) if text), key=_length)
        self.ids = np.array([i for _, i in known], np.int32)
        texts = [text for text, _ in known]
        self._levels: list[np.ndarray] = []  # of the first byte, the second, and so on
        while texts:
            depth = len(self._levels)
            self._levels.append(np.array([text[depth] for text in texts], np.int32))
            texts = [text for text in texts if len(text) > depth + 1]

    def some(self, token_ids: np.ndarray) -> "TokenBytes":
        """Return some of the tokens, numbered in this order."""
        places = np.full(self.size, -1)
        places[self.ids] = np.arange(len(self.ids))
        rows = places[token_ids]
        texts = [bytes(int(x[row]) for x in self._levels if row < len(x)) for row in rows]
        return TokenBytes([*texts])

    def walk(self, table: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Find where each token leads.

        Args:
            table: int32[states * 256], the state after each byte. The last state is that of what
                may not follow, and leads to itself.
            state: before the token.

        Returns:
            The ids of the tokens that may follow, int32[n], and the state after each, int32[n].
        """
        dead = len(table) // 256 - 1
        states = table[state * 256 + self._levels[0]]
        alive = np.flatnonzero(states != dead)
        if 2 * len(alive) > len(states):  # then to leave the others out takes longer than they do
            for level in self._levels[1:]:
                states[: len(level)] = table[states[: len(level)] * 256 + level]
            alive = np.flatnonzero(states != dead)
            return self.ids[alive], states[alive]
        states = states[alive]
        for level in self._levels[1:]:
            longer = int(np.searchsorted(alive, len(level)))
            if not longer:
                break
            states[:longer] = table[states[:longer] * 256 + level[alive[:longer]]]
            kept = states != dead
            alive, states = alive[kept], states[kept]
        return self.ids[alive], states


def _length(token: tuple[bytes, int]) -> int:
    return -len(token[0])


def token_bytes(tokenizer: Any, vocabulary_size: int) -> TokenBytes:
    """Return the bytes of the tokens of a tokenizer of KerasHub.

    Args:
        tokenizer: by byte pairs, of SentencePiece, or with names that are bytes, as RWKV's.
        vocabulary_size: how many token ids the model has.

    Raises:
        SurgeryError: it is of another kind.
    """
    read = _reader(tokenizer)
    special = {*special_tokens(tokenizer), *_unsplittable(tokenizer)}
    tokens: list[bytes | None] = [None] * vocabulary_size
    for i in range(min(vocabulary_size, tokenizer.vocabulary_size())):
        name = token_name(i, tokenizer)
        if name is not None and name not in special:
            tokens[i] = read(i, name)
    return TokenBytes(tokens)


def _unsplittable(tokenizer: Any) -> Iterable[str]:
    return getattr(tokenizer, "unsplittable_tokens", None) or ()


def _reader(tokenizer: Any) -> Callable[[int, Any], bytes | None]:
    """Return what reads the bytes off an id and its name."""
    kinds = keras_hub.tokenizers
    if isinstance(tokenizer, kinds.SentencePieceTokenizer):
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto)
        return lambda i, name: _of_piece(pieces, i, name)
    if isinstance(tokenizer, kinds.BytePairTokenizer):
        alphabet = _alphabet()
        return lambda i, name: _of_pair(alphabet, name)
    if isinstance(token_name(tokenizer.vocabulary_size() - 1, tokenizer), bytes):
        return lambda i, name: name
    raise SurgeryError(
        "response_format: expected a tokenizer by byte pairs, of SentencePiece, or RWKV's. "
        f"Received {type(tokenizer).__name__}. Leave `response_format` out."
    )


def _of_piece(pieces: Any, token_id: int, name: str) -> bytes | None:
    if pieces.IsByte(token_id):
        found = _BYTE.fullmatch(name)
        return None if found is None else bytes([int(found[1], 16)])
    without_text = (pieces.IsControl, pieces.IsUnknown, pieces.IsUnused)
    if any(is_so(token_id) for is_so in without_text) or _MARK.fullmatch(name):
        return None
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _of_pair(alphabet: dict[str, int], name: str) -> bytes | None:
    if _MARK.fullmatch(name):
        return None
    if all(character in alphabet for character in name):
        return bytes(alphabet[character] for character in name)
    return name.encode()


def _alphabet() -> dict[str, int]:
    """Return the byte that each character stands for, in the vocabularies of byte-level BPE.

    Printable bytes stand for themselves, and the others, in order, for what comes after Latin-1.
    Source: GPT-2, Radford et al. 2019.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
