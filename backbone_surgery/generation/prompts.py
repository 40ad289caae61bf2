"""Prompts: from what a user passes to `generate` to rows of token ids, and back to text."""

import contextlib
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backbone_surgery.byte_pairs import warn_of_words
from backbone_surgery.errors import SurgeryError, shown, shown_array
from backbone_surgery.generation.chat import ChatPrompt, chat_ids
from backbone_surgery.numbers import read_array, read_mask

_SURROGATES = re.compile("[\ud800-\udfff]")
_UNKNOWN = b"\xff"
"""Stands for a token that a tokenizer has no text for: no character begins so."""

_first_use = threading.Lock()
"""Held while Keras builds a preprocessor, at its first text: threads that do so at once fail."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        rows: for each row its token ids, int32[length], without padding.
        scalar: whether the prompt is one string, so that one is to be returned.
        width: width of the padded arrays; `None` where the prompts are text.
    """

    rows: list[np.ndarray]
    scalar: bool = False
    width: int | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int32[batch]."""
        return np.array([len(row) for row in self.rows], np.int32)


def read_prompts(inputs: Any, preprocessor: Any, vocabulary_size: int, operation: str) -> Prompts:
    """Read the prompts of a call to `generate`, or the texts of another operation.

    Args:
        inputs: with a preprocessor a string or a sequence of them; with or without one a dict of
            `token_ids` int[batch, length] and `padding_mask` [batch, length] padded on either
            side.
        preprocessor: a `keras_hub.models.CausalLMPreprocessor` or `None`.
        vocabulary_size: how many tokens the model knows.
        operation: whose prompts they are, for errors.
    """
    if preprocessor is None:
        prompts = _from_arrays(inputs, operation)
    elif isinstance(inputs, dict):
        prompts = replace(_from_arrays(inputs, operation), width=None)
    else:
        prompts = _from_text(inputs, preprocessor, operation)
    if not prompts.rows:
        raise SurgeryError(
            f"{operation}: expected at least one prompt. Received an empty batch. Pass a prompt."
        )
    for i, row in enumerate(prompts.rows):
        if not len(row):
            raise SurgeryError(
                f"{operation} at row {i}: expected at least one token to start from. Received an "
                "empty prompt, and no start token is added to it. Pass a prompt with text, or a "
                "preprocessor whose tokenizer has a start token."
            )
        if row.min() < 0 or row.max() >= vocabulary_size:
            raise SurgeryError(
                f"{operation} at row {i}: expected token ids from 0 to {vocabulary_size - 1}. "
                f"Received ids from {row.min()} to {row.max()}. Use the tokenizer of the model."
            )
    return replace(prompts, rows=[row.astype(np.int32) for row in prompts.rows])


def check_preprocessor(preprocessor: Any) -> None:
    """Refuse what cannot make tokens of text; `None` is no preprocessor.

    Raises:
        SurgeryError: it has no `generate_preprocess`.
    """
    if preprocessor is not None and not hasattr(preprocessor, "generate_preprocess"):
        raise SurgeryError(
            "CachedCausalLM at 'preprocessor': expected a `CausalLMPreprocessor`, or None. "
            f"Received one of type {type(preprocessor).__name__}. Pass that of the model, such as "
            "`lm.preprocessor`."
        )


def text_alone(samples: Any, packed: Any, names: Iterable[str]) -> Any:
    """Leave out what a preprocessor makes of images, for a model opened for text alone.

    Args:
        samples: what the preprocessor was given.
        packed: what it returned, `x` or a tuple that begins with `x`.
        names: inputs of the model.

    Returns:
        As `packed`, with the inputs of the model alone in `x`.
    """
    x, *others = packed if isinstance(packed, tuple) else (packed,)
    if not isinstance(x, dict) or set(x) <= set(names):
        return packed
    given = set(samples) - {"prompts", "responses"} if isinstance(samples, dict) else set()
    if given:
        raise SurgeryError(
            "fit: expected samples of `prompts` and `responses`, since the model was opened for "
            f"text alone. Received {shown(sorted(given))} too. Leave them out."
        )
    x = {name: x[name] for name in names}
    return (x, *others) if others else x


def text_list(value: Any) -> Any:
    """Return an array of strings as a list; anything else, such as token ids, as it is."""
    if not hasattr(value, "shape"):
        return value
    try:
        array = np.asarray(value)
    except Exception:  # a symbolic tensor, say
        return value
    return array.tolist() if array.dtype.kind in "OSTU" or not array.size else value


def _from_text(inputs: Any, preprocessor: Any, operation: str) -> Prompts:
    texts, scalar = _texts(inputs, operation)
    if not texts:
        return Prompts([])
    try:
        built = getattr(preprocessor, "built", True)
        with contextlib.nullcontext() if built else _first_use:
            tokens = preprocessor.tokenizer(texts)
            longest = max((len(t) for t in tokens), default=0)
            if getattr(preprocessor.tokenizer, "start_token_id", None) is None and not all(
                len(t) for t in tokens
            ):
                return Prompts([np.asarray(t) for t in tokens], scalar)  # RWKV-7's stops at these
            packed = preprocessor.generate_preprocess(texts, sequence_length=longest + 8)
    except Exception as error:
        raise SurgeryError(
            f"{operation} at 'inputs': expected text that the tokenizer can read. Received "
            f"{shown(texts)}: {type(error).__name__}, {error}. Pass other text."
        ) from error
    warn_of_words(preprocessor.tokenizer, texts, tokens)
    if "predict_token_ids" in packed:  # RWKV-7's hands the last token over by itself
        whole = [np.asarray(row) for row in tokens]
    else:
        ids, masks = np.asarray(packed["token_ids"]), np.asarray(packed["padding_mask"], bool)
        whole = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    rows = [
        chat_ids(text, preprocessor.tokenizer) if isinstance(text, ChatPrompt) else row
        for text, row in zip(texts, whole, strict=True)
    ]
    return Prompts(rows, scalar)


def _texts(inputs: Any, operation: str) -> tuple[list[str], bool]:
    """Return the texts, and whether one was passed that stands in no list."""
    try:
        texts = text_list(inputs)
        scalar = isinstance(texts, str | bytes)
        texts = [texts] if scalar else texts
        listed = isinstance(texts, Sequence)
        texts = [t.decode() if isinstance(t, bytes) else t for t in texts] if listed else []
    except Exception:  # no array, or bytes that are no text
        listed, scalar, texts = False, False, []
    if not listed or not all(isinstance(t, str) for t in texts):
        raise SurgeryError(
            f"{operation}: expected a string or a list of strings, since a preprocessor is "
            f"attached. Received {shown(inputs)}. Pass text, or token ids as a dict of `token_ids` "
            "and `padding_mask`."
        )
    for i, text in enumerate(texts):
        if not text.isascii() and _SURROGATES.search(text):
            raise SurgeryError(
                f"{operation} at text {i}: expected text that UTF-8 can hold. Received half of a "
                "surrogate pair, as escapes of JSON can leave it. Take it out."
            )
    return [t if isinstance(t, ChatPrompt) else str(t) for t in texts], scalar


def _from_arrays(inputs: Any, operation: str) -> Prompts:
    if not isinstance(inputs, dict) or not {"token_ids", "padding_mask"} <= set(inputs):
        received = shown(list(inputs) if isinstance(inputs, dict) else inputs)
        raise SurgeryError(
            f"{operation}: expected a dict of arrays `token_ids` and `padding_mask`, or text with "
            f"a preprocessor attached. Received {received}. Pass one of these."
        )
    others = [name for name in inputs if name not in ("token_ids", "padding_mask")]
    others = [name for name in others if _says_something(name, inputs[name])]
    if others:
        raise SurgeryError(
            f"{operation}: expected `token_ids` and `padding_mask`, since the model takes text "
            f"alone. Received {shown(sorted(others, key=str))} too. Leave them out."
        )
    ids, mask = read_array(inputs["token_ids"]), read_mask(inputs["padding_mask"])
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise SurgeryError(
            f"{operation} at 'token_ids': expected int[batch, length]. Received "
            f"{shown_array(inputs['token_ids'])}. Pass right-padded or left-padded arrays."
        )
    if mask is None or mask.shape != ids.shape:
        raise SurgeryError(
            f"{operation} at 'padding_mask': expected bool{list(ids.shape)}, of the same shape as "
            f"`token_ids`. Received {shown_array(inputs['padding_mask'])}. Pass true, or 1, where "
            "there is a token."
        )
    changes = np.abs(np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)).sum(axis=1)
    if (changes > 2).any():
        raise SurgeryError(
            f"{operation} at 'padding_mask': expected padding at the ends of rows. Received "
            f"padding between tokens in row {int((changes > 2).argmax())}. Close the gaps."
        )
    rows = [row[keep] for row, keep in zip(ids, mask, strict=True)]
    return Prompts(rows, width=ids.shape[1])


def _says_something(name: str, value: Any) -> bool:
    """Whether an input is other than what a preprocessor gives where there are no images."""
    if value is None:
        return False
    try:
        array = np.asarray(value)
        plain = np.arange(array.shape[-1]) if name == "position_ids" else 0
        return array.size > 0 and (array.ndim > 2 or bool(np.any(array != plain)))
    except Exception:  # whatever the conversion of an object runs into
        return True


def pack_left(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad rows on the left: int32[batch, length] and its mask, bool[batch, length]."""
    ids = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
        mask[i, length - len(row) :] = True
    return ids, mask


def pack_right(rows: list[np.ndarray], length: int, pad: int) -> dict[str, np.ndarray]:
    """Pad rows on the right, as KerasHub does: `{"token_ids", "padding_mask"}`."""
    ids = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = True
    return {"token_ids": ids, "padding_mask": mask}


def to_text(rows: list[np.ndarray], preprocessor: Any) -> list[str]:
    """Turn rows of token ids into text, without special tokens."""
    width = max((len(r) for r in rows), default=0)
    try:
        texts = preprocessor.generate_postprocess(pack_right(rows, max(width, 1), 0))
    except (UnicodeDecodeError, KeyError):  # RWKV-7's stops at half a character, or an unknown id
        names = [[token_name(int(i), preprocessor.tokenizer) for i in row if i] for row in rows]
        if not all(isinstance(n, bytes | None) for row in names for n in row):
            raise
        texts = [b"".join(n or _UNKNOWN for n in row).decode(errors="replace") for row in names]
    return [str(t) for t in texts]


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens of a tokenizer that stand for no text."""
    return tuple(getattr(tokenizer, "special_tokens", None) or ())


def token_name(token_id: int, tokenizer: Any) -> Any:
    """Return what a tokenizer calls a token, a string or bytes; `None` where it has none of it."""
    try:
        return tokenizer.id_to_token(token_id)
    except (IndexError, KeyError, ValueError):
        return None
