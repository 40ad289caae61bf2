"""A request: everything one call of `generate` or `stream` asks for, checked and resolved."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.chat import chat_of, token_id
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.generation.formats.requested import check_stops, read_formats
from backbone_surgery.generation.prompts import Prompts, pack_right, read_prompts, text_list
from backbone_surgery.generation.run_batch import Batch
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.numbers import is_int, read_array, read_int32

LONGEST = 2**30
"""Tokens that a row can have at most, so that no number of a slot is too large for an int32."""

_drawing = threading.Lock()


@dataclass(frozen=True)
class Limits:
    """How long each row may become.

    Attributes:
        budget: int32[batch], the most new tokens of each row.
        width: width of the padded arrays that are returned without a preprocessor.
    """

    budget: np.ndarray
    width: int


class TooLongError(SurgeryError):
    """A prompt and its new tokens are more than there is room for.

    Attributes:
        needed: how many tokens they are.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class Request(NamedTuple):
    """What one call asks for: the prompts, how long rows may become, and the batch to run."""

    prompts: Prompts
    limits: Limits
    batch: Batch

    def results(self, new: Sequence[np.ndarray], strip_prompt: bool) -> Any:
        """Return rows with these new tokens as `generate` does: as text, or as padded arrays."""
        pairs = zip(self.prompts.rows, new, strict=True)
        if self.batch.stops.preprocessor is None:
            rows = [n if strip_prompt else np.concatenate([p, n]) for p, n in pairs]
            return pack_right(rows, self.limits.width, 0)
        texts = [self.batch.stops.render(p, n, strip_prompt) for p, n in pairs]
        return texts[0] if self.prompts.scalar else texts


def check_backend(operation: str) -> None:
    """Refuse a backend that cannot generate, or take gradients as they are taken here."""
    if keras.config.backend() != "jax":
        raise SurgeryError(
            f"{operation}: expected the JAX backend of Keras. Received '{keras.config.backend()}'. "
            "Set KERAS_BACKEND=jax; surgery itself works on every backend."
        )


def read_request(
    lm: Any,
    inputs: Any,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    stop_token_ids: Any = "auto",
    stop_sequences: Any = None,
    controls: Mapping[str, Any] | None = None,
    seed: Any = None,
    captures: bool = False,
    operation: str = "generate",
    response_format: Any = None,
) -> Request:
    """Check everything a call of a task asks for, before anything is compiled.

    Args:
        lm: the `CachedCausalLM`.
        inputs: see `CachedCausalLM.generate`, as for all that follow.
        max_length: see there.
        max_new_tokens: see there.
        stop_token_ids: see there.
        stop_sequences: see there.
        controls: see there.
        seed: see there.
        captures: whether to return what the graph captures.
        operation: what was called, for errors.
        response_format: see there.

    Raises:
        SurgeryError: bad input, or a backend that cannot generate.
    """
    check_backend(operation)
    preprocessor, vocabulary_size = lm.preprocessor, lm.programs.head.input_dim
    prompts = read_prompts(inputs, preprocessor, vocabulary_size, operation)
    limits = resolve_limits(
        prompts,
        max_length,
        max_new_tokens,
        getattr(preprocessor, "sequence_length", None),
        lm.max_positions,
        operation,
    )
    stop_ids = resolve_stop_ids(
        stop_token_ids, preprocessor, vocabulary_size, lm.opened.family.stop_tokens, operation
    )
    texts, sequences = resolve_stop_sequences(
        stop_sequences, preprocessor, vocabulary_size, operation
    )
    formats = read_formats(
        response_format, len(prompts.rows), preprocessor, vocabulary_size, operation
    )
    check_stops(formats, stop_ids, operation)
    run = prompts.lengths + np.maximum(limits.budget - 1, 0)  # the last new token is not run
    batch = Batch(
        rows=prompts.rows,
        budget=limits.budget,
        seeds=resolve_seeds(seed, len(prompts.rows), lm.sampler, operation),
        controls=bind_controls(lm.opened, controls, prompts.lengths, operation, run),
        stops=Stops(stop_ids, texts, sequences, preprocessor),
        formats=formats,
        captures=captures,
    )
    if captures and not lm.opened.captures:
        raise SurgeryError(
            f"{operation} at 'return_captures': expected a backbone that captures something. "
            "Received one without a `Capture`. Add `backbone_surgery.Capture('blocks.*')`, "
            "say, to its rewrites."
        )
    return Request(prompts, limits, batch)


def resolve_limits(
    prompts: Prompts,
    max_length: int | None,
    max_new_tokens: int | None,
    default_length: int | None,
    max_positions: int | None,
    operation: str,
) -> Limits:
    """Resolve how long each row may become.

    Args:
        prompts: the prompts.
        max_length: tokens of a row at most, its prompt included.
        max_new_tokens: new tokens of a row at most.
        default_length: taken for `max_length` when neither of them is passed.
        max_positions: how many positions the model has learned, if it is limited.
        operation: what was called, for errors.
    """
    _check_numbers(max_length, max_new_tokens, operation)
    lengths = prompts.lengths
    longest = int(lengths.max())
    if max_new_tokens is not None:
        budget = np.full(len(lengths), max_new_tokens, np.int32)
    else:
        total = max_length
        if total is None:
            total = prompts.width or min(default_length or longest, max_positions or 2**31)
        budget = (total - lengths).astype(np.int32)
        if longest > total:
            raise TooLongError(
                f"{operation} at row {int(lengths.argmax())}: expected a prompt of at most {total} "
                f"tokens, the maximal length. Received one of {longest}. Shorten it, or allow "
                "more: by `max_length`, or by the `length` of an engine.",
                longest,
            )
    needed = int((lengths + budget).max())
    if max_positions is not None and needed > max_positions:
        raise TooLongError(
            f"{operation}: expected at most {max_positions} tokens in a row, prompt included, "
            f"since the model has learned no more positions. Received a request for {needed} (the "
            f"longest prompt has {longest}). Shorten the prompt or ask for fewer new tokens.",
            needed,
        )
    return Limits(budget, needed)


def _check_numbers(max_length: Any, max_new_tokens: Any, operation: str) -> None:
    if max_length is not None and max_new_tokens is not None:
        raise SurgeryError(
            f"{operation}: expected `max_length` or `max_new_tokens`. Received both, "
            f"{shown(max_length)} and {shown(max_new_tokens)}. Leave one out."
        )
    for name, value in (("max_length", max_length), ("max_new_tokens", max_new_tokens)):
        smallest = 1 if name == "max_length" else 0
        if value is not None and (not is_int(value) or not smallest <= value <= LONGEST):
            raise SurgeryError(
                f"{operation} at '{name}': expected an int of at least {smallest}, and at most "
                f"{LONGEST}. Received {shown(value)}. Pass a number of tokens."
            )


def resolve_stop_ids(
    stop_token_ids: Any,
    preprocessor: Any,
    vocabulary_size: int,
    stop_tokens: tuple[str, ...],
    operation: str,
) -> list[int]:
    """Resolve the stop token ids as KerasHub does.

    `"auto"` takes the end tokens of the tokenizer, the stop tokens of the family, and what a
    folder of Hugging Face says in `generation_config.json`.
    """
    if stop_token_ids is None:
        return []
    if isinstance(stop_token_ids, str):
        if stop_token_ids != "auto" or preprocessor is None:
            raise SurgeryError(
                f"{operation} at 'stop_token_ids': expected 'auto' with a preprocessor attached, "
                f"`None`, or token ids. Received {shown(stop_token_ids)} with preprocessor "
                f"{'attached' if preprocessor is not None else 'None'}. Pass "
                "`stop_token_ids=None` to go on to the maximal length, or token ids."
            )
        tokenizer = preprocessor.tokenizer
        ends = (getattr(tokenizer, n, None) for n in ("end_token_id", "end_token2_id"))
        others = (token_id(token, tokenizer) for token in stop_tokens)
        further = (i for i in chat_of(preprocessor).ends if i < vocabulary_size)
        found = (*ends, *others, *further)
        return list(dict.fromkeys(int(i) for i in found if i is not None))
    ids = _read_ids(stop_token_ids, vocabulary_size)
    if ids is None:
        raise SurgeryError(
            f"{operation} at 'stop_token_ids': expected token ids from 0 to {vocabulary_size - 1}. "
            f"Received {shown(stop_token_ids)}. Pass a tuple of ints; for text use "
            "`stop_sequences`."
        )
    return [int(i) for i in ids]


def _read_ids(value: Any, vocabulary_size: int) -> np.ndarray | None:
    """Read one token id or a list of them, int32[ids]."""
    if isinstance(value, list | tuple) and not value:
        return np.zeros(0, np.int32)
    ids = read_int32(value, 0, vocabulary_size - 1)
    return None if ids is None or ids.ndim > 1 else np.atleast_1d(ids)


def resolve_seeds(seed: Any, batch: int, sampler: Any, operation: str) -> np.ndarray:
    """Resolve the random state of each row, uint32[batch, 2].

    A row with seed s starts in the state of `keras.random.SeedGenerator(s)`. One int is the seed
    of every row. Without a seed, each row gets one of its own from the sampler's generator.
    """
    if seed is None:
        with _drawing:  # two threads of a server would draw the same
            base = [np.asarray(g.next()) for g in _generators(sampler)[:1]]
        entropy = [int(x) for x in base[0]] if base else None
        seeds = np.random.SeedSequence(entropy).generate_state(batch)
    else:
        values = read_array([seed] * batch if is_int(seed) else seed)
        fits = values is not None and values.shape == (batch,) and values.dtype.kind in "iu"
        if values is None or not fits or not ((0 <= values) & (values < 2**32)).all():
            raise SurgeryError(
                f"{operation} at 'seed': expected an int from 0 to 2**32 - 1, or a list of "
                f"{batch}, one for each row. Received {shown(seed)}. Pass one of these."
            )
        seeds = values.astype(np.uint32)
    return np.stack([seeds, np.zeros_like(seeds)], axis=-1).astype(np.uint32)


def _generators(sampler: Any) -> list[keras.random.SeedGenerator]:
    return [v for v in vars(sampler).values() if isinstance(v, keras.random.SeedGenerator)]


def resolve_stop_sequences(
    stop_sequences: Any, preprocessor: Any, vocabulary_size: int, operation: str
) -> tuple[list, list]:
    """Resolve stop sequences into texts and sequences of token ids.

    Returns:
        `(texts, id_sequences)`.
    """
    if stop_sequences is None:
        return [], []
    stop_sequences = text_list(stop_sequences)
    if isinstance(stop_sequences, str) or not isinstance(stop_sequences, Sequence):
        stop_sequences = [stop_sequences]
    texts = [s for s in stop_sequences if isinstance(s, str)]
    others = [s for s in stop_sequences if not isinstance(s, str)]
    sequences = [_read_ids(s, vocabulary_size) for s in others if not is_int(s)]
    well_formed = len(sequences) == len(others) and all(s is not None and len(s) for s in sequences)
    if not well_formed or "" in texts or (texts and preprocessor is None):
        raise SurgeryError(
            f"{operation} at 'stop_sequences': expected a list of non-empty strings (with a "
            f"preprocessor attached) or of sequences of token ids from 0 to {vocabulary_size - 1}. "
            f"Received {shown(stop_sequences)}. Pass one of these."
        )
    return texts, sequences
