"""What is wrong with the fields of a request, in plain words."""

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError

from backbone_surgery.errors import closest, shown

_WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "extra_forbidden": "no such field",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "json_invalid": "JSON ({error} at character {at})",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "the id of a token",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_long": "at most {max_length} entries",
    "too_short": "a list of at least {min_length}",
}
"""What was expected, by the type of pydantic's error."""


def describe(error: RequestValidationError, fields: Iterable[str]) -> tuple[str, str]:
    """Return the field that is wrong, or `body`, and what to say of it.

    Args:
        error: of FastAPI.
        fields: those that the request may have.
    """
    errors = error.errors()
    first = max(errors, key=_depth)
    path = _path(first)
    name, *rest = path
    if first["type"] == "extra_forbidden" and not rest:
        return name, f"'{name}' is not a known field. {closest(name, fields)}"
    where = ".".join([f"'{name}'", *map(str, rest)])
    if first["type"] == "missing":
        return name, f"{where}: expected a value. Received none. Send one."
    alike = [e for e in errors if _depth(e) == _depth(first) and _path(e) == path]
    expected = " or ".join(dict.fromkeys(map(_expected, alike)))
    received = error.body if name == "body" else first["input"]
    return name, f"{where}: expected {expected}. Received {shown(received)}."


def _depth(error: Mapping[str, Any]) -> tuple[int, bool]:
    """Tell how deep a value fits the type that an error is of; of several, the deepest was meant.

    What has the right type, and is too long, say, fits deeper than what has another.
    """
    return len(error["loc"]), not error["type"].endswith("_type")


def _path(error: Mapping[str, Any]) -> list[Any]:
    """Return where an error is, without the types that were tried, such as `list[str]`."""
    _, *path = error["loc"]
    if not path or error["type"] == "json_invalid":
        return ["body"]
    texts = "str", "constrained-str"
    return [path[0], *(p for p in path[1:] if p not in texts and "[" not in str(p))]


def _expected(error: Mapping[str, Any]) -> str:
    words = _WORDS.get(error["type"])
    if words is None:  # a check of ours
        return str(error["msg"]).removeprefix("expected ")
    facts = error.get("ctx", {}).items()
    given = {name: f"{x:g}" if isinstance(x, float) else x for name, x in facts}
    return words.format(**given, at=error["loc"][-1])
