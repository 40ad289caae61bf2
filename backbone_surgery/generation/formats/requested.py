"""Response formats that are asked for: they are read, for each row, before anything runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.formats.table import (
    NEVER,
    OVER,
    START,
    STOP,
    FormatTable,
    table_of,
)


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
