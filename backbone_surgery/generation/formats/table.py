"""The table of a response format: which token may follow where, for the tokens of one model.

A regular expression is turned into an automaton over bytes, by the package `outlines-core`, and
that into one over tokens. Tokens that lead to the same states from everywhere are one class, so the
table is small: it has a row for each state and a column for each class. The compiled loop looks up
the state after the token that was chosen. Which tokens it may choose from is a mask, a bit for each
token. Few states differ in theirs, so masks are few, and a step reads one for each row: to look up
single numbers for all tokens is slow on a TPU.

Source: Willard and Louf 2023, Efficient Guided Generation for Large Language Models,
arXiv:2307.09702. There the tokens of each state are listed on the host.
"""

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.formats.automaton import SECONDS, Automaton, make_automaton
from backbone_surgery.generation.formats.automaton_script import BYTES
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.formats.token_bytes import TokenBytes, token_bytes

OVER, START = 0, 1
"""States: of a text that is whole, and of one that begins."""

STOP, NEVER = 0, 1
"""Classes: of stop tokens, whatever their text, and of tokens without text."""

MOST_ENTRIES = 2**22
"""Of a table: for each state its mask, and the state after a token of each class."""

MOST_MASKS = 2**12

_LANES = 128
"""Words of masks come in groups of so many: a TPU then moves none of them to unpack them."""

_KEPT_BYTES = 2**28
"""Of the tables for one tokenizer; at least the last one is kept."""


@dataclass(frozen=True, eq=False)
class FormatTable:
    """What may follow in a text of one format.

    Attributes:
        following: int16[states, classes], the state after a token of a class; -1 where it may not
            follow.
        classes: int16[vocabulary], the class of each token.
        masks: uint32[masks, words], the tokens that may follow: token `i` has bit `i // words` of
            word `i % words`. Stop tokens have the bit after the last token's instead of their own.
        mask_of: int16[states], the mask of each state.
    """

    following: np.ndarray
    classes: np.ndarray
    masks: np.ndarray
    mask_of: np.ndarray

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def end(self, new: np.ndarray, stop_ids: list[int]) -> int | None:
        """Return how many of the new tokens the text has when it is whole; `None` if it is not."""
        state, stops = START, set(stop_ids)
        for count, token in enumerate(new.tolist(), 1):
            kind = STOP if token in stops else self.classes[token]
            state = int(self.following[state, kind])
            if state == OVER:
                return count
            if state < 0:
                return None
        return None


class _Tables:
    """What was made for one tokenizer."""

    def __init__(self, vocabulary: Any) -> None:
        self.vocabulary = vocabulary
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._making: dict[tuple[str, int], threading.Lock] = {}
        self._tables: OrderedDict[tuple[str, int], FormatTable] = OrderedDict()
        self._tokens: TokenBytes | None = None

    def tokens(self, tokenizer: Any, size: int) -> TokenBytes:
        """Return the bytes of the tokens, which are read once."""
        with self._reading:
            if self._tokens is None or self._tokens.size != size:
                self._tokens = token_bytes(tokenizer, size)
            return self._tokens

    def get(self, key: tuple[str, int]) -> FormatTable | None:
        """Return a table that is kept; nobody waits here for one that is being made."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
            return self._tables.get(key)

    def put(self, key: tuple[str, int], table: FormatTable) -> FormatTable:
        """Keep a table, and let go of those that were not used for longest."""
        with self._lock:
            self._tables[key] = table
            total = sum(x.nbytes for x in self._tables.values())
            while total > _KEPT_BYTES and len(self._tables) > 1:
                total -= self._tables.popitem(last=False)[1].nbytes
        return table

    @contextlib.contextmanager
    def making(self, key: tuple[str, int]) -> Iterator[None]:
        """Have nobody else make a table meanwhile, but others."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            try:
                yield
            finally:
                with self._lock:
                    self._making.pop(key, None)


_made: weakref.WeakKeyDictionary[Any, _Tables] = weakref.WeakKeyDictionary()
_sorting = threading.Lock()


def is_made(wanted: ResponseFormat, tokenizer: Any, vocabulary_size: int) -> bool:
    """Tell whether the table of a format is kept."""
    return _of(tokenizer).get((wanted.regex, vocabulary_size)) is not None


def table_of(wanted: ResponseFormat, tokenizer: Any, vocabulary_size: int) -> FormatTable:
    """Return the table of a format for a tokenizer; those used last are kept.

    Args:
        wanted: the format.
        tokenizer: of KerasHub.
        vocabulary_size: how many token ids the model has.

    Raises:
        SurgeryError: the format is no regular expression, too large, or nothing that the tokenizer
            can write.
    """
    made, key = _of(tokenizer), (wanted.regex, vocabulary_size)
    table = made.get(key)
    if table is not None:
        return table
    with made.making(key):
        found = made.get(key)
        if found is not None:
            return found
        return made.put(key, make_table(wanted, made.tokens(tokenizer, vocabulary_size)))


def _of(tokenizer: Any) -> _Tables:
    vocabulary = getattr(tokenizer, "proto", None) or getattr(tokenizer, "vocabulary", None)
    with _sorting:
        made = _made.get(tokenizer)
        if made is None or made.vocabulary is not vocabulary:  # another one was set since
            made = _made[tokenizer] = _Tables(vocabulary)
        return made


def make_table(wanted: ResponseFormat, tokens: TokenBytes) -> FormatTable:
    """Make the table of a format for some tokens; see `table_of`.

    What is kept of each state are the states after it and, of all states together, a number for
    each token, which tells classes apart. The walks themselves would take gigabytes.
    """
    import_extra("response_format", "outlines_core")
    try:
        automaton = make_automaton(wanted.regex)
        return _walked(automaton, tokens)
    except ValueError as error:
        raise SurgeryError(
            "response_format: expected a format that this model can keep to. Received "
            f"{wanted.kind} {shown(wanted.regex)}, but {str(error)[:200]}. Change it."
        ) from error


def _walked(automaton: Automaton, tokens: TokenBytes) -> FormatTable:
    """Walk an automaton by the bytes of all tokens.

    Raises:
        ValueError: no token leads on from its first state, or the table is too large.
    """
    table, first, ends = automaton
    random, until = np.random.default_rng(0), time.monotonic() + SECONDS
    of_target = random.integers(1, 2**64, len(table) // BYTES, np.uint64)
    columns = np.zeros(tokens.size, np.uint64)
    targets: dict[int, np.ndarray] = {}
    waiting = [first]
    while waiting:
        state = waiting.pop()
        if state in targets:
            continue
        ids, states = tokens.walk(table, state)
        columns[ids] += of_target[states] * random.integers(1, 2**64, dtype=np.uint64)
        targets[state] = np.flatnonzero(np.bincount(states))
        waiting += targets[state].tolist()
        if time.monotonic() > until:
            raise ValueError(f"its table takes more than {SECONDS} seconds")
    alive = _alive(targets, set(ends.tolist()))
    order = [s for s in targets if s in alive and not alive.isdisjoint(targets[s].tolist())]
    if first not in order:
        empty = first in alive
        raise ValueError(
            "a text has at least one character" if empty else "no tokens of this model write it"
        )
    numbers = np.full(len(of_target), -1)
    numbers[list(alive)] = OVER  # a state that ends a text, and that nothing follows
    numbers[order] = START + np.arange(len(order))  # the first one first, as it was walked from
    return _filled(automaton, tokens, columns, order, numbers)


def _alive(targets: dict[int, np.ndarray], ends: set[int]) -> set[int]:
    """Return the states from which some tokens lead to the end of a text."""
    before: dict[int, list[int]] = {}
    for state, following in targets.items():
        for target in following.tolist():
            before.setdefault(target, []).append(state)
    alive: set[int] = set()
    waiting = [state for state in targets if state in ends]
    while waiting:
        state = waiting.pop()
        if state not in alive:
            alive.add(state)
            waiting += before.get(state, [])
    return alive


def _filled(
    automaton: Automaton,
    tokens: TokenBytes,
    columns: np.ndarray,
    order: list[int],
    numbers: np.ndarray,
) -> FormatTable:
    """Fill a table, by one token of each class.

    Args:
        automaton: over bytes.
        tokens: the tokens.
        columns: uint64[vocabulary], alike for tokens of one class, and 0 for those without text.
        order: the states of the automaton that have rows, from `START` on.
        numbers: int64[states], what the table calls each of them; -1 for those that lead nowhere.
    """
    columns = np.append(np.uint64(0), columns)  # of all columns, 0 comes first
    _, examples, classes = np.unique(columns, return_index=True, return_inverse=True)
    shape = len(order) + START, len(examples) + NEVER
    if shape[0] * (shape[1] + 1) > MOST_ENTRIES or max(shape) > np.iinfo(np.int16).max:
        raise ValueError(
            f"its table has {shape[0]} states and {shape[1]} classes of tokens, which is more than "
            f"{MOST_ENTRIES} entries or {2**15 - 1} of either"
        )
    following = np.full(shape, -1, np.int16)
    following[OVER] = OVER
    following[START:, STOP] = np.where(np.isin(order, automaton.ends), OVER, -1)
    some = tokens.some(examples[1:] - 1)
    for row, state in enumerate(order, START):
        kinds, states = some.walk(automaton.table, state)
        following[row, kinds + NEVER + 1] = numbers[states]
    classes = (classes[1:] + NEVER).astype(np.int16)
    return FormatTable(following, classes, *_masks(following, classes))


def words_of(vocabulary_size: int) -> int:
    """Return how many words a mask has."""
    return -(-(vocabulary_size + 1) // (np.iinfo(np.uint32).bits * _LANES)) * _LANES


def _masks(following: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks of a table, and the one of each state; see `FormatTable`."""
    kinds, mask_of = np.unique(following >= 0, axis=0, return_inverse=True)
    if len(kinds) > MOST_MASKS:
        raise ValueError(
            f"{len(kinds)} of its states differ in the tokens that may follow, which is more than "
            f"{MOST_MASKS}"
        )
    bits = np.iinfo(np.uint32).bits
    words = words_of(len(classes))
    allowed = np.zeros(bits * words, bool)
    masks = np.empty((len(kinds), words), np.uint32)
    for mask, kind in zip(masks, kinds, strict=True):
        allowed[: len(classes) + 1] = np.append(kind[classes], kind[STOP])
        packed = np.packbits(allowed.reshape(bits, words), axis=0, bitorder="little")
        mask[:] = np.ascontiguousarray(packed.T).view("<u4")[:, 0]
    return masks, mask_of.reshape(-1).astype(np.int16)
