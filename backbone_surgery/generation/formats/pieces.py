"""Regular expressions of one text, of any of some others, and of whole numbers."""

from collections.abc import Iterable

_META = frozenset(r"\.+*?()|[]{}^$#&-~")

DIGITS = 15
"""How many a number has at most."""

LARGEST = 10**DIGITS - 1


def escape(text: str) -> str:
    """Return the regular expression of one text."""
    return "".join(f"\\{c}" if c in _META else c for c in text)


def any_of(parts: Iterable[str]) -> str:
    """Return the regular expression of any of some others."""
    return f"({'|'.join(parts)})"


def whole_numbers(least: int, most: int) -> str:
    """Return the expression of the whole numbers from one to another, both of them included.

    Args:
        least: from -`LARGEST`.
        most: to `LARGEST`, and not below `least`.
    """
    parts = []
    if least < 0:
        parts.append(f"-{_magnitudes(max(1, -most), -least)}")
    if most >= 0:
        parts.append(_magnitudes(max(0, least), most))
    return any_of(parts)


def _magnitudes(least: int, most: int) -> str:
    """Return that of the numbers between two that are not negative."""
    parts = []
    for count in range(len(str(least)), len(str(most)) + 1):
        shortest = 0 if count == 1 else 10 ** (count - 1)
        bounds = max(least, shortest), min(most, 10**count - 1)
        parts.append(_alike(*map(str, bounds)))
    return any_of(parts)


def _alike(least: str, most: str) -> str:
    """Return that of the numbers between two of the same length, which may begin with zeros."""
    rest = len(least) - 1
    if least == "0" * len(least) and most == "9" * len(most):
        return f"[0-9]{{{len(least)}}}"
    if not rest:
        return f"[{least}-{most}]"
    first, last = int(least[0]), int(most[0])
    if first == last:
        return least[0] + _alike(least[1:], most[1:])
    parts = [least[0] + _alike(least[1:], "9" * rest), most[0] + _alike("0" * rest, most[1:])]
    if last - first > 1:
        parts.append(f"[{first + 1}-{last - 1}][0-9]{{{rest}}}")
    return any_of(parts)
