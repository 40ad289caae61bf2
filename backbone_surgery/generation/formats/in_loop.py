"""Response formats in the compiled loop: its arrays, which hold tables, and what a step does."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.formats.table import START, STOP, FormatTable

Arrays = dict[str, Any]

OVER, FREE = -1, -2
"""States in the loop: of a row whose text is whole, and of one without a format."""

LEAST = {"following": 2**16, "masks": 2**8, "classes": 4}
"""How long the arrays are at least."""

_GROWTH = 4
"""They have one of a few lengths, so that another format seldom is another program."""

_MOST_ENTRIES = 2**30
"""Of the tables of all rows together: their numbers are 32 bits wide."""


def sizes_of(table: FormatTable) -> dict[str, int]:
    """Return how much of each array a table takes."""
    states, classes = table.following.shape
    return {"following": (states - START) * (classes + 1), "masks": len(table.masks), "classes": 1}


def parts_of(table: FormatTable, starts: dict[str, int]) -> Arrays:
    """Return what the arrays hold of a table.

    In the loop a state is where its entries begin, `OVER`, or `FREE`.

    Args:
        table: the table.
        starts: where its part of each array begins.

    Returns:
        `following` int32[entries], of each state which mask it has, and the state after a token of
        each class; `masks` uint32[masks, words]; and `classes` int16[1, vocabulary].
    """
    following = table.following[START:].astype(np.int32)
    width = following.shape[1] + 1
    after = np.where(following < START, OVER, starts["following"] + (following - START) * width)
    entries = np.column_stack([starts["masks"] + table.mask_of[START:], after])
    return {
        "following": entries.reshape(-1).astype(np.int32),
        "masks": table.masks,
        "classes": table.classes[None],
    }


def length_for(name: str, needed: int) -> int:
    """Return the length of an array that holds so much."""
    length = LEAST[name]
    while length < needed:
        length *= _GROWTH
    return length


def lengthened(x: np.ndarray, length: int) -> np.ndarray:
    """Lengthen an array by zeros."""
    return np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)])


def arrays_of(tables: Sequence[FormatTable | None]) -> Arrays:
    """Return the arrays for some rows, with each table once; see `parts_of` and `for_rows`.

    Args:
        tables: of each row; at least one is a table.

    Raises:
        SurgeryError: the tables are too large together.
    """
    distinct = list(dict.fromkeys(table for table in tables if table is not None))
    sizes = [sizes_of(table) for table in distinct]
    ends = {name: np.cumsum([0, *(size[name] for size in sizes)]).tolist() for name in LEAST}
    most = max(last for *_, last in ends.values())
    if most > _MOST_ENTRIES:
        raise SurgeryError(
            f"response_format: expected formats with at most {_MOST_ENTRIES} entries of tables "
            f"together. Received {most}. Generate for fewer rows at once."
        )
    starts = {t: {name: ends[name][i] for name in LEAST} for i, t in enumerate(distinct)}
    parts = [parts_of(table, starts[table]) for table in distinct]
    wholes = {name: np.concatenate([part[name] for part in parts]) for name in LEAST}
    arrays = {name: lengthened(x, length_for(name, len(x))) for name, x in wholes.items()}
    return {**arrays, **for_rows(tables, starts)}


def for_rows(
    tables: Sequence[FormatTable | None], starts: dict[FormatTable, dict[str, int]]
) -> Arrays:
    """Return what rows know of their tables.

    Args:
        tables: of the rows.
        starts: where the parts of each table begin. A table that is not among them is none.

    Returns:
        `states` int32[rows], the ones they begin in; and `which` int32[rows], where their classes
        are. Those of a row without a table are never looked at.
    """
    none = {"following": FREE, "classes": 0}
    found = [none if table is None else starts.get(table, none) for table in tables]
    return {
        "states": np.array([x["following"] for x in found], np.int32),
        "which": np.array([x["classes"] for x in found], np.int32),
    }


def with_stops(formats: Arrays, stop_ids: jax.Array, width: int = 1) -> Arrays:
    """Return the arrays with what depends on the row alone, to be made before a loop.

    Args:
        formats: see `parts_of`, with `which`, see `for_rows`.
        stop_ids: int32[ids] or int32[rows, ids], stop tokens; negative ones are none.
        width: candidate rows of each row.
    """
    vocabulary, count = formats["classes"].shape[1], len(formats["which"])
    stop_ids = jnp.broadcast_to(stop_ids, (count, stop_ids.shape[-1]))
    rows, known = jnp.arange(count)[:, None], jnp.where(stop_ids < 0, vocabulary, stop_ids)
    of_rows = {
        "which": formats["which"],
        "stop_ids": stop_ids,
        "is_stop": jnp.zeros((count, vocabulary), bool).at[rows, known].set(True, mode="drop"),
    }
    of_rows = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), of_rows)
    return {**{name: formats[name] for name in LEAST}, **of_rows}


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
    rows, size = logits.shape
    mask_of = jnp.take(formats["following"], states, mode="clip")
    words = jnp.take(formats["masks"], mask_of, axis=0, mode="clip")
    bit = jnp.arange(jnp.iinfo(words.dtype).bits, dtype=words.dtype)[:, None]
    bits = ((words[:, None] >> bit) & 1).reshape(rows, -1)[:, :size]
    place, word = divmod(size, words.shape[1])
    stops = (words[:, word, None] >> place) & 1
    allowed = jnp.where(formats["is_stop"], stops, bits) == 1
    states, is_first = states[:, None], jnp.arange(size) == 0
    allowed = jnp.where(states < 0, is_first | (states == FREE), allowed)
    return jnp.where(allowed, logits, -jnp.inf)


def next_states(formats: Arrays, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the states after some tokens, int32[rows].

    A beam that had no allowed token has probability 0, and counts as over.

    Args:
        formats: from `with_stops`.
        states: int32[rows], before the tokens.
        tokens: int32[rows], negative where none was chosen.
    """
    tokens = jnp.maximum(tokens, 0)
    is_stop = (tokens[:, None] == formats["stop_ids"]).any(axis=1)
    kinds = formats["classes"][formats["which"], tokens]
    kinds = jnp.where(is_stop, STOP, kinds)
    following = jnp.take(formats["following"], states + 1 + kinds, mode="clip")
    return jnp.where(states < 0, states, following)
