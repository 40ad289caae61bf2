"""Response formats of rows: their arrays, and what the compiled loop does with them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.formats.table import (
    FREE,
    NEVER,
    OVER,
    START,
    STOP,
    FormatTable,
    table_of,
    words_of,
)

Arrays = dict[str, Any]

_LEAST_ENTRIES, _LEAST_MASKS = 2**16, 2**8
_GROWTH = 4
"""Tables have one of a few sizes, so that another format seldom is another program."""


def read_formats(
    response_format: Any, rows: int, preprocessor: Any, vocabulary_size: int, operation: str
) -> list[FormatTable | None]:
    """Return the table of each row; of a row without a format `None`. Nothing if no row has one.

    Args:
        response_format: a format, `None`, or a list with one of these for each row.
        rows: how many there are.
        preprocessor: whose tokenizer makes text of tokens.
        vocabulary_size: how many token ids the model has.
        operation: what was called, for errors.

    Raises:
        SurgeryError: it is something else, or `table_of` refuses a format.
    """
    is_list = isinstance(response_format, list) and len(response_format) == rows
    wanted = response_format if is_list else [response_format] * rows
    if not all(isinstance(x, ResponseFormat | None) for x in wanted):
        raise _no_format(response_format, operation, f", or a list of {rows}, one for each row")
    if not any(wanted):
        return []
    return [
        None if x is None else _table_of(x, preprocessor, vocabulary_size, operation)
        for x in wanted
    ]


def read_format(
    response_format: Any, preprocessor: Any, vocabulary_size: int, operation: str
) -> FormatTable | None:
    """Return the table of one format; see `read_formats`."""
    if not isinstance(response_format, ResponseFormat | None):
        raise _no_format(response_format, operation)
    if response_format is None:
        return None
    return _table_of(response_format, preprocessor, vocabulary_size, operation)


def _no_format(response_format: Any, operation: str, others: str = "") -> SurgeryError:
    return SurgeryError(
        f"{operation} at 'response_format': expected a `bs.ResponseFormat` or None{others}. "
        f"Received {shown(response_format)}. Pass `bs.ResponseFormat.choice([' yes', ' no'])`, say."
    )


def _table_of(
    wanted: ResponseFormat, preprocessor: Any, vocabulary_size: int, operation: str
) -> FormatTable:
    if preprocessor is None:
        raise SurgeryError(
            f"{operation} at 'response_format': expected a model with a preprocessor, whose tokens "
            "are known. Received one without. Attach a preprocessor."
        )
    return table_of(wanted, preprocessor.tokenizer, vocabulary_size)


def check_stops(
    tables: Sequence[FormatTable | None], stop_ids: Sequence[int], operation: str
) -> None:
    """Refuse stop tokens whose text a format needs before its end: they come at the end alone.

    Args:
        tables: of the rows.
        stop_ids: the stop tokens.
        operation: what was called, for errors.
    """
    for table in dict.fromkeys(tables):
        stops = [] if table is None else [i for i in stop_ids if table.classes[i] != NEVER]
        if table is None or not stops:
            continue
        counts = np.bincount(table.classes, minlength=table.following.shape[1])
        counts -= np.bincount(table.classes[stops], minlength=len(counts))
        counts[STOP] = 1
        following = table.following[:, counts > 0]
        ends = np.arange(len(following)) == OVER
        before = np.zeros_like(ends)
        while (before != ends).any():
            before, ends = ends, ends | (ends[following] & (following >= 0)).any(axis=1)
        if not ends[START:].all():
            raise SurgeryError(
                f"{operation} at 'stop_token_ids': expected tokens whose text is not needed for "
                f"the `response_format`. Received {shown(stops)}, which come at its end alone. "
                "Pass others, or `stop_token_ids=None`."
            )


class Room(NamedTuple):
    """For how many entries and masks of a table there is room."""

    entries: int = 0
    masks: int = 0

    def for_tables(self, *tables: FormatTable) -> "Room":
        """Return the room that is needed for some tables too."""
        entries = (table.following.size + len(table.mask_of) for table in tables)
        masks = (len(table.masks) for table in tables)
        return Room(
            _size(max(entries), max(self.entries, _LEAST_ENTRIES)),
            _size(max(masks), max(self.masks, _LEAST_MASKS)),
        )

    def empty(self, rows: int, vocabulary_size: int) -> Arrays:
        """Return arrays as those of `arrays_of`, for rows without a format."""
        words = words_of(vocabulary_size)
        return {
            "following": np.zeros((rows, self.entries), np.int16),
            "width": np.zeros(rows, np.int32),
            "classes": np.zeros((rows, vocabulary_size), np.int16),
            "masks": np.full((rows, self.masks, words), np.iinfo(np.uint32).max, np.uint32),
        }


def _size(needed: int, least: int) -> int:
    while least < needed:
        least *= _GROWTH
    return least


def arrays_of(tables: Sequence[FormatTable], room: Room) -> Arrays:
    """Return tables as arrays.

    Args:
        tables: the tables; not none.
        room: that each of them has.

    Returns:
        `following` int16[tables, entries], of which `width` int32[tables] are of one state: its
        mask, and the state after a token of each class; `classes` int16[tables, vocabulary]; and
        `masks` uint32[tables, masks, words].
    """
    states = [np.column_stack([table.mask_of, table.following]) for table in tables]
    return {
        "following": np.stack([_filled(x.reshape(-1), room.entries) for x in states]),
        "width": np.array([x.shape[1] for x in states], np.int32),
        "classes": np.stack([table.classes for table in tables]),
        "masks": np.stack([_filled(table.masks, room.masks) for table in tables]),
    }


def _filled(x: np.ndarray, length: int) -> np.ndarray:
    """Lengthen an array by zeros."""
    return np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)])


def arrays_of_rows(tables: Sequence[FormatTable | None]) -> tuple[Arrays, np.ndarray]:
    """Return the arrays of all rows, with each table once, and the state that each begins in.

    Args:
        tables: of each row; at least one is a table.
    """
    distinct = list(dict.fromkeys(table for table in tables if table is not None))
    count = 1
    while count < len(distinct):
        count *= 2
    filled = [*distinct, *[distinct[0]] * (count - len(distinct))]
    which = [0 if table is None else distinct.index(table) for table in tables]
    states = [FREE if table is None else START for table in tables]
    arrays = arrays_of(filled, Room().for_tables(*distinct))
    return {**arrays, "which": np.array(which, np.int32)}, np.array(states, np.int32)


def with_stops(formats: Arrays, stop_ids: jax.Array, width: int = 1) -> Arrays:
    """Return the arrays with what depends on the row alone, to be made before a loop.

    Args:
        formats: from `arrays_of`; with `which` int32[rows], the table of each row, or one for each.
        stop_ids: int32[ids] or int32[rows, ids], stop tokens; negative ones are none.
        width: candidate rows of each row.
    """
    tables, vocabulary = formats["classes"].shape
    which = formats.get("which", jnp.arange(tables, dtype=jnp.int32))
    stop_ids = jnp.broadcast_to(stop_ids, (len(which), stop_ids.shape[-1]))
    rows, known = jnp.arange(len(which))[:, None], jnp.where(stop_ids < 0, vocabulary, stop_ids)
    of_rows = {
        "which": which,
        "width": formats["width"][which],
        "stop_ids": stop_ids,
        "is_stop": jnp.zeros((len(which), vocabulary), bool).at[rows, known].set(True, mode="drop"),
    }
    of_rows = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), of_rows)
    return {**{name: formats[name] for name in ("following", "classes", "masks")}, **of_rows}


def keep_format(logits: jax.Array, formats: Arrays, states: jax.Array) -> jax.Array:
    """Take away the tokens that may not follow.

    A beam whose text is whole goes on with token 0, which costs nothing, so it stays as likely as
    it is.

    Args:
        logits: float[rows, vocabulary].
        formats: from `with_stops`.
        states: int32[rows].

    Returns:
        The logits, minus infinity for these tokens.
    """
    (rows, size), which = logits.shape, formats["which"]
    mask_of = formats["following"][which, states * formats["width"]]
    words = formats["masks"][which, mask_of]
    places = jnp.arange(jnp.iinfo(words.dtype).bits, dtype=words.dtype)[:, None]
    bits = ((words[:, None] >> places) & 1).reshape(rows, -1)[:, :size]
    place, word = divmod(size, words.shape[1])
    stops = (words[:, word, None] >> place) & 1
    allowed = jnp.where(formats["is_stop"], stops, bits) == 1
    is_over, is_first = (states == OVER)[:, None], (jnp.arange(size) == 0)[None]
    return jnp.where(jnp.where(is_over, is_first, allowed), logits, -jnp.inf)


def next_states(formats: Arrays, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the states after some tokens, int32[rows].

    A beam that had no allowed token has probability 0, and counts as over.

    Args:
        formats: from `with_stops`.
        states: int32[rows], before the tokens.
        tokens: int32[rows], negative where none was chosen.
    """
    which, tokens = formats["which"], jnp.maximum(tokens, 0)
    is_stop = (tokens[:, None] == formats["stop_ids"]).any(axis=1)
    kinds = jnp.where(is_stop, STOP, formats["classes"][which, tokens])
    entries = states * formats["width"] + 1 + kinds
    following = formats["following"][which, entries].astype(jnp.int32)
    return jnp.where(following < 0, OVER, following)
