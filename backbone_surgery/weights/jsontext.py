"""JSON from files that are not trusted: nothing doubled, nothing infinite, nothing too deep."""

import json
import math
from typing import Any

from backbone_surgery.errors import RecipeError

_DEPTH = 40


def parse(data: bytes, where: str) -> Any:
    """Parse JSON strictly.

    Args:
        data: UTF-8 text.
        where: named in the error.

    Raises:
        RecipeError: no JSON, a key given twice, a number that is not finite, or deep nesting.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse,
            parse_float=_finite,
        )
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"read at '{where}': expected well-formed JSON. Received data where {error}. The file "
            "is damaged; get it again."
        ) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} stands for a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEPTH):
        inner = [x for x in level if isinstance(x, dict | list)]
        if not inner:
            return
        level = [y for x in inner for y in (x.values() if isinstance(x, dict) else x)]
    raise ValueError(f"values are nested more than {_DEPTH} deep")
