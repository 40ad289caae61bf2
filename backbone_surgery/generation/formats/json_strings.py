"""Strings of a JSON Schema: their lengths, patterns and formats, as regular expressions of JSON."""

import math
from collections.abc import Mapping
from typing import Any

from backbone_surgery.generation.formats.patterns import CHARACTER, read_pattern
from backbone_surgery.generation.formats.pieces import any_of, times
from backbone_surgery.generation.formats.schema_errors import bounds, check_alone, refusal

KEYWORDS = frozenset({"minLength", "maxLength", "format", "pattern"})
"""That say which strings fit."""

ANY = f'"{CHARACTER}*"'

_DAYS = {"(0[13578]|1[02])": "|29|3[01]", "(0[469]|11)": "|29|30", "02": ""}
_DATE = "[12][0-9]{3}-" + any_of(
    f"{months}-(0[1-9]|1[0-9]|2[0-8]{last})" for months, last in _DAYS.items()
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_HEX = "[0-9a-f]"
_GROUP = f"{_HEX}{{1,4}}"
_GROUPS = ["", *(f"{_GROUP}(:{_GROUP}){{{n}}}" for n in range(7))]
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
_WORD = "[A-Za-z0-9_+-]{1,16}"
_N = "[0-9]{1,4}"
_HOURS = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)({_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_WORD}(\.{_WORD}){{0,2}}@{_LABEL}(\.{_LABEL}){{0,2}}\.[a-z]{{2,8}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,5}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": any_of(
        [
            f"{_GROUP}(:{_GROUP}){{7}}",
            *(f"{_GROUPS[n]}::({_GROUP}(:{_GROUP}){{0,{6 - n}}})?" for n in range(7)),
            f"{_GROUPS[7]}::",
        ]
    ),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}


def string_of(schema: Mapping[str, Any], where: str) -> str:
    """Return the expression of the strings that fit what a schema says of them.

    Args:
        schema: of strings.
        where: it stands, for errors.

    Raises:
        SurgeryError: it says what cannot be kept.
    """
    if "format" in schema:
        check_alone(KEYWORDS & set(schema) - {"format"}, f"{where} beside 'format'")
        if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise refusal(f"{where} at 'format'", f"one of {known}", schema["format"])
        return f'"{_FORMATS[schema["format"]]}"'
    least, most = bounds(schema, "minLength", "maxLength", where)
    if "pattern" in schema:
        regex = _pattern(schema["pattern"], least, most, f"{where} at 'pattern'")
        return f'"{regex}"'
    return f'"{CHARACTER}{times(least, most)}"'


def _pattern(pattern: Any, least: int, most: int | None, where: str) -> str:
    try:
        if not isinstance(pattern, str):
            raise ValueError("it is no string")
        found = read_pattern(pattern)
    except ValueError as error:
        rule = "a pattern that JavaScript and Python read alike"
        raise refusal(where, f"{rule}, but {error}", pattern) from error
    if found.least < least or found.most > (math.inf if most is None else most):
        raise refusal(
            where,
            f"one of {least} to {most} characters, as 'minLength' and 'maxLength' have it, such as "
            f"'^[a-z]{{{least},{most or least}}}$'",
            pattern,
        )
    return found.regex
