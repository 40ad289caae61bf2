"""Rows: what a shard holds in its columns. What does not fit is refused by its file and row."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backbone_surgery.datasets.shards import Rows, Shard
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.vectors.activations import read_texts

_MARKS = 8
"""Tokens that a preprocessor may put around a text, such as a start token, at most."""


def place(operation: str, shard: Shard, row: int) -> str:
    """Name a row in an error.

    Args:
        operation: what is done.
        shard: what the row is of.
        row: its number within the shard.
    """
    return f"{operation} at row {shard.start + row} of '{shard.file}'"


def read_column(
    operation: str,
    shard: Shard,
    table: Rows,
    column: str,
    expected: str,
    fits: Callable[[Any], bool],
) -> list[Any]:
    """Return what the rows of a shard hold in a column.

    Args:
        operation: named in the error.
        shard: the shard.
        table: its rows.
        column: the name of the column.
        expected: what is to be there, for the error.
        fits: tells whether a value is that.

    Raises:
        SurgeryError: a value is not.
    """
    values = table.column(column)
    for row, value in enumerate(values):
        if not fits(value):
            raise SurgeryError(
                f"{place(operation, shard, row)}: expected {expected} in column '{column}'. "
                f"Received {shown(value)}. Give it one, or leave the row out."
            )
    return values


def by_row(
    operation: str, shard: Shard, values: Mapping[int, Any], read: Callable[[list[Any]], Any]
) -> Any:
    """Read values of rows together; if that fails, name the first row that fails alone.

    Args:
        operation: named in the error.
        shard: what the rows are of.
        values: by the number of the row within the shard.
        read: is called with values, and raises a `SurgeryError` where one is wrong.
    """
    try:
        return read(list(values.values()))
    except SurgeryError:
        for row, value in values.items():
            try:
                read([value])
            except SurgeryError as error:
                text = str(error).removeprefix(f"{operation}: ")
                raise SurgeryError(f"{place(operation, shard, row)}: {text}") from error
        raise


def read_tokens(
    operation: str,
    lm: CachedCausalLM,
    shard: Shard,
    texts: Mapping[int, Any],
    most: int | None = None,
    remedy: str = "Shorten it.",
) -> list[np.ndarray]:
    """Turn texts into rows of token ids, int32[tokens] each.

    Args:
        operation: named in the error.
        lm: the model.
        shard: what the texts are of.
        texts: by the number of the row within the shard.
        most: how many tokens of a text to keep; all by default.
        remedy: what to do with a text that is too long, for the error.

    Raises:
        SurgeryError: a text cannot be read, or has more tokens than the model learned positions.
    """
    if not texts:
        return []

    def read(listed: list[Any]) -> list[np.ndarray]:
        return read_texts(lm, listed, operation, most, remedy)

    return by_row(operation, shard, texts, read)


def doubtful(lm: CachedCausalLM, texts: Mapping[int, Any], new: int = 0) -> dict[int, Any]:
    """Leave out the texts that surely fit: a check need not turn them into tokens.

    A token stands for one byte at least, so a text has no more tokens than bytes.

    Args:
        lm: the model.
        texts: by the number of the row within the shard.
        new: how many tokens are to be added to each.
    """
    if lm.preprocessor is None:
        return dict(texts)
    most = (lm.max_positions or LONGEST) - new - _MARKS
    return {row: text for row, text in texts.items() if _bytes(text) > most}


def _bytes(text: Any) -> float:
    """Return how many bytes a text has; without end, if UTF-8 cannot hold it or it is no text."""
    try:
        return len(text.encode())
    except (AttributeError, UnicodeEncodeError):
        return math.inf
