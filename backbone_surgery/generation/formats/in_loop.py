"""Response formats in the compiled loop: its arrays, which hold tables, and what a step does."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.formats.table import FREE, OVER, START, STOP, FormatTable

Arrays = dict[str, Any]

LEAST = {"following": 2**16, "masks": 2**8, "classes": 4}
"""How long the arrays are at least."""

_GROWTH = 4
"""They have one of a few lengths, so that another format seldom is another program."""

_MOST_ENTRIES = 2**30
"""Of the tables of all rows together: their numbers are 32 bits wide."""


class Place(NamedTuple):
    """Where the arrays hold a table.

    Attributes:
        classes: where its classes are.
        entry: its first entry of `following`.
        width: how many of them are of one state.
        mask: its first mask.
    """

    classes: int
    entry: int
    width: int
    mask: int

    @classmethod
    def of(cls, table: FormatTable, starts: dict[str, int]) -> "Place":
        """Return the place of a table whose parts begin at these entries of the arrays."""
        width = table.following.shape[1] + 1
        return cls(starts["classes"], starts["following"], width, starts["masks"])


def sizes_of(table: FormatTable) -> dict[str, int]:
    """Return how much of each array a table takes."""
    states, classes = table.following.shape
    return {"following": states * (classes + 1), "masks": len(table.masks), "classes": 1}


def parts_of(table: FormatTable) -> Arrays:
    """Return what the arrays hold of a table.

    Returns:
        `following` int16[entries], of each state its mask, and the state after a token of each
        class; `masks` uint32[masks, words]; and `classes` int16[1, vocabulary].
    """
    states = np.column_stack([table.mask_of, table.following])
    return {"following": states.reshape(-1), "masks": table.masks, "classes": table.classes[None]}


def length_for(name: str, needed: int) -> int:
    """Return the length of an array that holds so much."""
    length = LEAST[name]
    while length < needed:
        length *= _GROWTH
    return length


def lengthened(x: np.ndarray, length: int) -> np.ndarray:
    """Lengthen an array by zeros."""
    return np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)])


def places_of(tables: Sequence[FormatTable | None], places: dict[FormatTable, Place]) -> Arrays:
    """Return for each row where its table is: `{name: int32[rows]}` of a `Place`.

    A row without a table is told of any: its state never changes, and allows all tokens.

    Args:
        tables: of the rows.
        places: of tables; at least one.
    """
    some, *_ = places.values()
    found = [some if table is None else places.get(table, some) for table in tables]
    columns = zip(Place._fields, zip(*found, strict=True), strict=True)
    return {name: np.array(column, np.int32) for name, column in columns}


def arrays_of(tables: Sequence[FormatTable | None]) -> tuple[Arrays, np.ndarray]:
    """Return the arrays for some rows, with each table once, and the state that each begins in.

    Args:
        tables: of each row; at least one is a table.

    Raises:
        SurgeryError: the tables are too large together.
    """
    distinct = list(dict.fromkeys(table for table in tables if table is not None))
    parts = [parts_of(table) for table in distinct]
    arrays, starts = {}, {}
    for name in LEAST:
        *first, needed = np.cumsum([0, *(len(part[name]) for part in parts)]).tolist()
        if needed > _MOST_ENTRIES:
            raise SurgeryError(
                f"response_format: expected formats with at most {_MOST_ENTRIES} entries of "
                f"tables together. Received {needed}. Generate for fewer rows at once."
            )
        whole = np.concatenate([part[name] for part in parts])
        arrays[name], starts[name] = lengthened(whole, length_for(name, needed)), first
    places = {
        table: Place.of(table, {name: first[i] for name, first in starts.items()})
        for i, table in enumerate(distinct)
    }
    states = [FREE if table is None else START for table in tables]
    return {**arrays, "places": places_of(tables, places)}, np.array(states, np.int32)


def with_stops(formats: Arrays, stop_ids: jax.Array, width: int = 1) -> Arrays:
    """Return the arrays with what depends on the row alone, to be made before a loop.

    Args:
        formats: see `parts_of`, with `places`, see `places_of`.
        stop_ids: int32[ids] or int32[rows, ids], stop tokens; negative ones are none.
        width: candidate rows of each row.
    """
    vocabulary, places = formats["classes"].shape[1], formats["places"]
    count = len(places["classes"])
    stop_ids = jnp.broadcast_to(stop_ids, (count, stop_ids.shape[-1]))
    rows, known = jnp.arange(count)[:, None], jnp.where(stop_ids < 0, vocabulary, stop_ids)
    of_rows = {
        "places": places,
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
    (rows, size), places = logits.shape, formats["places"]
    mask_of = formats["following"][places["entry"] + states * places["width"]]
    words = formats["masks"][places["mask"] + mask_of]
    bit = jnp.arange(jnp.iinfo(words.dtype).bits, dtype=words.dtype)[:, None]
    bits = ((words[:, None] >> bit) & 1).reshape(rows, -1)[:, :size]
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
    places, tokens = formats["places"], jnp.maximum(tokens, 0)
    is_stop = (tokens[:, None] == formats["stop_ids"]).any(axis=1)
    kinds = jnp.where(is_stop, STOP, formats["classes"][places["classes"], tokens])
    entries = places["entry"] + states * places["width"] + 1 + kinds
    following = formats["following"][entries].astype(jnp.int32)
    return jnp.where(following < 0, OVER, following)
