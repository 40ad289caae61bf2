"""What a JSON Schema says that cannot be kept, and is refused."""

from collections.abc import Iterable
from typing import Any

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int

_LONGEST = 2**20


def refusal(where: str, rule: str, received: Any) -> SurgeryError:
    """Return the error for a part of a schema."""
    return SurgeryError(
        f"ResponseFormat.json_schema, {where}: expected {rule}. Received {shown(received)}. Write "
        "the schema in another way."
    )


def check_alone(others: Iterable[str], where: str) -> None:
    """Refuse keywords that cannot be kept."""
    names = sorted(map(str, others))
    if names:
        raise SurgeryError(
            f"ResponseFormat.json_schema, {where}: expected keywords that can be kept. Received "
            f"{', '.join(map(repr, names))}. Leave these out and check the answers, or write a "
            "regular expression."
        )


def check_length(length: int, where: str) -> None:
    """Refuse expressions that are too long."""
    if length > _LONGEST:
        raise SurgeryError(
            f"ResponseFormat.json_schema, {where}: expected what takes at most {_LONGEST} "
            "characters as a regular expression. Received more. Ask for less at once."
        )


def bounds(schema: Any, first: str, last: str, where: str) -> tuple[int, int | None]:
    """Return the bounds that two keywords give, whole numbers of which the last may be missing."""
    least, most = schema.get(first, 0), schema.get(last)
    numbers = [least, most] if last in schema else [least]
    if not all(is_int(n) and n >= 0 for n in numbers) or numbers != sorted(numbers):
        received = {name: schema[name] for name in (first, last) if name in schema}
        raise refusal(where, "whole numbers, the least one first", received)
    return least, most
