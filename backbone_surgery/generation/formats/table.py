"""The table of a response format: which token may follow where, for the tokens of one model.

A regular expression is turned into an automaton over bytes, by the package `outlines-core`, and
that into one over tokens. Tokens that lead to the same states from everywhere are one class, so the
table is small: it has a row for each state and a column for each class. The compiled loop looks it
up at each step.

Source: Willard and Louf 2023, Efficient Guided Generation for Large Language Models,
arXiv:2307.09702. There the tokens of each state are listed on the host.
"""

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.formats.automaton import BYTES, Automaton, make_automaton
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.formats.token_bytes import TokenBytes, token_bytes

FREE, OVER, START = 0, 1, 2
"""States: of a row without a format, of one whose text is whole, and of one that begins."""

STOP, NEVER = 0, 1
"""Classes: of stop tokens, whatever their text, and of tokens without text."""

MOST_ENTRIES = 2**22
"""Of a table."""

_KEPT = 32


@dataclass(frozen=True, eq=False)
class FormatTable:
    """What may follow in a text of one format.

    Attributes:
        following: int16[states, classes], the state after a token of a class; -1 where it may not
            follow.
        classes: int16[vocabulary], the class of each token.
    """

    following: np.ndarray
    classes: np.ndarray

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

    def __init__(self) -> None:
        self.lock, self.making = threading.Lock(), threading.Lock()
        self.tokens: TokenBytes | None = None
        self.tables: OrderedDict[tuple[str, int], FormatTable] = OrderedDict()

    def get(self, key: tuple[str, int]) -> FormatTable | None:
        """Return a table that is kept; nobody waits here for one that is being made."""
        with self.lock:
            if key in self.tables:
                self.tables.move_to_end(key)
            return self.tables.get(key)

    def put(self, key: tuple[str, int], table: FormatTable) -> FormatTable:
        """Keep a table, and let go of those that were not used for longest."""
        with self.lock:
            self.tables[key] = table
            while len(self.tables) > _KEPT:
                self.tables.popitem(last=False)
        return table


_made: weakref.WeakKeyDictionary[Any, _Tables] = weakref.WeakKeyDictionary()
_sorting = threading.Lock()


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
    with _sorting:
        made = _made.setdefault(tokenizer, _Tables())
    key = (wanted.regex, vocabulary_size)
    table = made.get(key)
    if table is not None:
        return table
    with made.making:
        if made.tokens is None or made.tokens.size != vocabulary_size:
            made.tokens = token_bytes(tokenizer, vocabulary_size)
        return made.get(key) or made.put(key, make_table(wanted.regex, made.tokens))


def make_table(regex: str, tokens: TokenBytes) -> FormatTable:
    """Make the table of a regular expression for some tokens; see `table_of`."""
    table, first, end_states = _automaton(regex)
    ends = set(end_states.tolist())
    walked: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    targets: dict[int, np.ndarray] = {}
    waiting = [first]
    while waiting:
        state = waiting.pop()
        if state not in walked:
            walked[state] = tokens.walk(table, state)
            targets[state] = np.flatnonzero(np.bincount(walked[state][1]))
            waiting += targets[state].tolist()
    alive = _alive(targets, ends)
    if first not in alive:
        raise _refusal(regex, "a text that the tokens of this model can write")
    order = [s for s in walked if s in alive and not alive.isdisjoint(targets[s].tolist())]
    if first not in order:
        raise _refusal(regex, "a text of at least one character")
    numbers = np.full(len(table) // BYTES, -1)
    numbers[list(alive)] = OVER  # a state that ends a text, and that nothing follows
    numbers[order] = START + np.arange(len(order))  # the first one first, as it was walked from
    rows = [(walked[s][0], numbers[walked[s][1]]) for s in order]
    return _compressed(rows, [s in ends for s in order], tokens.size, regex)


def _automaton(regex: str) -> Automaton:
    import_extra("response_format", "outlines_core")
    try:
        return make_automaton(regex)
    except ValueError as error:
        raise SurgeryError(
            "response_format: expected a regular expression without anchors, lookaround and back "
            f"references, and not too large a one. Received {shown(regex)}: {str(error)[:200]}. "
            "Write it in another way, in the syntax of the Rust crate `regex`."
        ) from error


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


def _compressed(
    rows: list[tuple[np.ndarray, np.ndarray]], ends: list[bool], size: int, regex: str
) -> FormatTable:
    """Make a table of the tokens that may follow in each state, and of the states after them.

    Args:
        rows: for each state from `START` on, token ids and states; -1 for those that lead nowhere.
        ends: which of these states end a text.
        size: how many token ids there are.
        regex: for errors.
    """
    columns = np.zeros(size, np.uint64)  # a number for each column, alike for columns alike
    random = np.random.default_rng(0)
    for ids, targets in rows:
        weights = random.integers(1, 2**64, len(rows) + START, np.uint64)
        there = targets >= 0
        columns[ids[there]] += weights[targets[there]]
    _, classes = np.unique(np.append(np.uint64(0), columns), return_inverse=True)
    classes = classes[1:] + NEVER  # of all columns, 0 comes first
    shape = len(rows) + START, int(classes.max(initial=NEVER)) + 1
    if np.prod(shape) > MOST_ENTRIES or max(shape) > np.iinfo(np.int16).max:
        rule = f"a table of at most {MOST_ENTRIES} entries, and {2**15 - 1} states and classes"
        raise _refusal(regex, rule, shape)
    following = np.full(shape, -1, np.int16)
    following[FREE], following[OVER] = FREE, OVER
    for state, (ids, targets) in enumerate(rows, START):
        following[state, classes[ids]] = targets
        following[state, STOP] = OVER if ends[state - START] else -1
    return FormatTable(following, classes.astype(np.int16))


def _refusal(regex: str, rule: str, shape: tuple[int, ...] | None = None) -> SurgeryError:
    received = shown(regex) if shape is None else f"{shown(regex)}, whose table is {list(shape)}"
    return SurgeryError(
        f"response_format: expected {rule}. Received {received}. Pass another format, or a shorter "
        "one."
    )
