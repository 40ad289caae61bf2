"""Numbers between two others, as regular expressions of how they are written."""

from decimal import Decimal
from typing import NamedTuple

from backbone_surgery.generation.formats.pieces import any_of

DIGITS = 15
"""How many a number has at most: so many tell floats of 64 bits apart."""

LARGEST = 10**DIGITS - 1


class Bound(NamedTuple):
    """An end of a range.

    Attributes:
        value: from -`LARGEST` to `LARGEST`.
        included: whether it belongs to the range.
    """

    value: Decimal
    included: bool


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


def decimals(low: Bound, high: Bound) -> str | None:
    """Return the expression of the numbers within a range; `None` if there are none.

    They have no exponent, and as many digits after the point as leave `DIGITS` in all.

    Args:
        low: where it begins.
        high: where it ends.
    """
    parts = []
    if low.value < 0:
        negative = Bound(-high.value, high.included) if high.value < 0 else Bound(Decimal(), False)
        found = _by_length(negative, Bound(-low.value, low.included))
        parts += [f"-{part}" for part in found]
    if high.value >= 0:
        parts += _by_length(low if low.value >= 0 else Bound(Decimal(), True), high)
    return any_of(parts) if parts else None


def _magnitudes(least: int, most: int) -> str:
    """Return that of the whole numbers between two that are not negative."""
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


class _Digits(NamedTuple):
    """A bound of what stands after the point: its digits, without zeros at the end."""

    digits: str
    included: bool

    @property
    def rest(self) -> "_Digits":
        return self._replace(digits=self.digits[1:])


def _by_length(low: Bound, high: Bound) -> list[str]:
    """Return those of a range without negative ones, in parts whose whole numbers are as long."""
    parts = []
    for count in range(1, DIGITS + 1):
        first = Bound(Decimal(0 if count == 1 else 10 ** (count - 1)), True)
        last = Bound(Decimal(10**count), False)
        first = max(first, low, key=lambda x: (x.value, not x.included))
        last = min(last, high, key=lambda x: (x.value, x.included))
        if first.value <= last.value:
            parts += _within(first, last, DIGITS - count)
    return parts


def _within(low: Bound, high: Bound, places: int) -> list[str]:
    """Return the expressions of numbers, none of them negative, in a range."""
    (first, after_first), (last, after_last) = _split(low), _split(high)
    if first == last:
        return _with_fraction(str(first), after_first, after_last, places)
    parts = _with_fraction(str(first), after_first, None, places)
    if last - first > 1:
        parts += _with_fraction(_magnitudes(first + 1, last - 1), None, None, places)
    return parts + _with_fraction(str(last), None, after_last, places)


def _split(bound: Bound) -> tuple[int, _Digits]:
    """Return the whole part of a bound, and what stands after its point."""
    whole, _, digits = f"{bound.value:f}".partition(".")
    return int(whole), _Digits(digits.rstrip("0"), bound.included)


def _with_fraction(whole: str, low: _Digits | None, high: _Digits | None, places: int) -> list[str]:
    """Return the expression of whole parts with what may stand after the point, if anything may."""
    found = _fractions(low, high, places)
    some = [part for part in found if part]
    if not some:
        return [whole] * len(found)
    return [rf"{whole}(\.{any_of(some)}){'?' * (len(some) < len(found))}"]


def _fractions(low: _Digits | None, high: _Digits | None, places: int) -> list[str]:
    """Return the expressions of digits after the point, "" for none of them.

    Args:
        low: their bound from below; `None` if they may be any.
        high: and from above.
        places: how many they are at most.
    """
    if low is not None and not low.digits and low.included:
        low = None
    none = [""] if low is None and (high is None or high.digits or high.included) else []
    if not places:
        return none
    if high is not None and not high.digits:  # zeros
        return [*none, f"0{{1,{places}}}"] if none else []
    first = int(low.digits[0]) if low is not None and low.digits else 0
    last = 9 if high is None else int(high.digits[0])
    parts, free = [], []
    for digit in range(first, last + 1):
        below = low.rest if low is not None and digit == first else None
        above = high.rest if high is not None and digit == last else None
        if below is None and above is None:
            free.append(digit)
        elif rest := _fractions(below, above, places - 1):
            parts.append(f"{digit}{any_of(rest)}")
    if free:
        parts.append(f"[{free[0]}-{free[-1]}][0-9]{{0,{places - 1}}}")
    return none + parts
