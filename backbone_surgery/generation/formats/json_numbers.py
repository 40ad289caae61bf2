"""Numbers of a JSON Schema, within its bounds, as regular expressions of JSON."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from backbone_surgery.generation.formats.numbers_between import (
    DIGITS,
    LARGEST,
    Bound,
    decimals,
    whole_numbers,
)
from backbone_surgery.generation.formats.schema_errors import refusal
from backbone_surgery.numbers import is_int

KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
"""That say which numbers fit."""

_INTEGER = rf"-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})"
ANY = rf"{_INTEGER}(\.[0-9]{{1,{DIGITS}}})?([eE][+-]?[0-9]{{1,2}})?"


def integers_of(schema: Mapping[str, Any], where: str) -> str:
    """Return the expression of the whole numbers that fit what a schema says of them.

    Args:
        schema: of integers.
        where: it stands, for errors.

    Raises:
        SurgeryError: its bounds are none, or nothing lies between them.
    """
    said = _bounds(schema, where)
    if not said:
        return _INTEGER
    least, most = -LARGEST, LARGEST
    for name, bound in said.items():
        if name == "minimum":
            least = max(least, math.ceil(bound))
        elif name == "exclusiveMinimum":
            least = max(least, math.floor(bound) + 1)
        elif name == "maximum":
            most = min(most, math.floor(bound))
        else:
            most = min(most, math.ceil(bound) - 1)
    if least > most:
        raise _nothing_between(said, where)
    return whole_numbers(least, most)


def numbers_of(schema: Mapping[str, Any], where: str) -> str:
    """Return the same of all numbers; those with bounds have no exponent."""
    said = _bounds(schema, where)
    if not said:
        return ANY
    low, high = Bound(Decimal(-LARGEST), True), Bound(Decimal(LARGEST), True)
    for name, value in said.items():
        bound = Bound(Decimal(repr(value)), not name.startswith("exclusive"))
        if name in ("minimum", "exclusiveMinimum"):
            low = max(low, bound, key=lambda x: (x.value, not x.included))
        else:
            high = min(high, bound, key=lambda x: (x.value, x.included))
    found = decimals(low, high) if low.value <= high.value else None
    if found is None:
        raise _nothing_between(said, where)
    return found


def _bounds(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = {name: schema[name] for name in sorted(KEYWORDS) if name in schema}
    for name, bound in said.items():
        if not is_int(bound) and not (isinstance(bound, float) and math.isfinite(bound)):
            raise refusal(f"{where} at '{name}'", "a finite number", bound)
    return said


def _nothing_between(said: dict[str, Any], where: str) -> Exception:
    return refusal(where, f"bounds that a number of {DIGITS} digits lies between", said)
