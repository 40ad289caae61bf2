r"""The `pattern` of a JSON Schema, as a regular expression of what stands between the quotes.

By the standard a pattern is JavaScript's, and for most who check one it is Python's. What both have
is taken, and only those texts that fit by both. So `\w` is an ASCII letter, digit or underscore,
and no letter of any alphabet is `\W`.
"""

import json
import math
import re
import warnings
from typing import NamedTuple

from backbone_surgery.generation.formats.pieces import any_of, escape

CHARACTER = (
    r'([^"\\\x00-\x1f]|\\["\\/bfnrt]'
    r"|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
"""One of a JSON string."""

_ESCAPED = r"\x{1}-\x{1f}\x{22}\x{5c}"
"""Characters that JSON has as escapes alone. Of these, a pattern has those that it names."""

_PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
_DIGIT, _WORD, _SPACE = r"\d", r"\w\p{N}", r"\s\x{feff}"
_SURELY = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\x{20}",
    "D": f"[^{_DIGIT}{_ESCAPED}]",
    "W": f"[^{_WORD}{_ESCAPED}]",
    "S": f"[^{_SPACE}{_ESCAPED}]",
}
"""What every reader takes for these, by the letter after the backslash."""

_PERHAPS = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\x{20}]",
}
"""What any reader takes for them."""

_LONGEST = 2**13
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")

_Item = tuple[int, int] | str
"""Of a class: characters from one to another, or a letter of `_SURELY`."""


class Pattern(NamedTuple):
    """A part of a pattern.

    Attributes:
        regex: of what stands in JSON.
        least: how many characters its texts have at least.
        most: and at most.
    """

    regex: str
    least: int
    most: float


def read_pattern(pattern: str) -> Pattern:
    """Return the expression of the strings that a pattern is found in.

    Raises:
        ValueError: it is no pattern, or has something that is not read alike everywhere.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST} characters")
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is no regular expression: {error}") from error
    return _Reader(pattern).alternatives(inside=False)


class _Reader:
    """Reads a pattern whose brackets are in order."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def alternatives(self, inside: bool) -> Pattern:
        """Read what has bars between it, to the end or, inside of brackets, to theirs."""
        parts = [self._sequence(inside)]
        while self._took("|"):
            parts.append(self._sequence(inside))
        regex = any_of(part.regex for part in parts)
        return Pattern(regex, min(p.least for p in parts), max(p.most for p in parts))

    def _sequence(self, inside: bool) -> Pattern:
        anything = Pattern(f"{CHARACTER}*", 0, math.inf)
        parts = [] if inside or self._took("^") else [anything]
        while self._next not in ("", "|", ")"):
            if not inside and self._took("$"):
                if self._next not in ("", "|"):
                    raise ValueError("it goes on after '$'")
                break
            parts.append(self._repeated())
        else:
            parts += [] if inside else [anything]
        regex = "".join(part.regex for part in parts)
        return Pattern(regex, sum(p.least for p in parts), sum(p.most for p in parts))

    def _repeated(self) -> Pattern:
        part = self._part()
        found = _COUNT.match(self._pattern, self._at)
        if found is None and self._next not in ("*", "+", "?"):
            return part
        text = found[0] if found else self._next
        self._at += len(text)
        least, most = int(text == "+"), 1 if text == "?" else math.inf
        if found:
            least = int(found[1])
            most = int(found[3]) if found[3] else math.inf if found[2] else least
        self._took("?")  # of the same texts it would take a short one first
        if self._next in ("*", "+", "?"):
            raise ValueError("what is repeated is repeated again")
        longest = part.most * most if part.most and most else 0
        return Pattern(part.regex + text, part.least * least, longest)

    def _part(self) -> Pattern:
        character = self._take()
        if character == "(":
            if self._took("?") and not self._took(":"):
                raise ValueError("of what begins with '(?' it may have '(?:' alone")
            part = self.alternatives(inside=True)
            self._take()
            return part
        if character in "^$":
            raise ValueError("it has an anchor that is not at its beginning or end")
        if character in "{}]":
            raise ValueError(f"'{character}' has to be written as '\\{character}'")
        if character == "[":
            return self._class()
        if character == ".":
            return _any_but([(0x2028, 0x2029)])
        return _any_of([self._escape() if character == "\\" else _code(character)])

    def _class(self) -> Pattern:
        """Read a class of characters, whose bracket was taken."""
        but = self._took("^")
        items = [self._item()]
        while not self._took("]"):
            items.append(self._item())
        return _any_but(items) if but else _any_of(items)

    def _item(self) -> _Item:
        first = self._one_of_class()
        if self._next != "-" or self._pattern[self._at + 1] == "]":
            return first
        self._take()
        last = self._one_of_class()
        if isinstance(first, str) or isinstance(last, str):
            raise ValueError("a range of characters has a class at its end")
        return first[0], last[1]

    def _one_of_class(self) -> _Item:
        character = self._take()
        if character == "]":
            raise ValueError("']' in a class has to be written as '\\]'")
        return self._escape() if character == "\\" else _code(character)

    def _escape(self) -> _Item:
        """Read what comes after a backslash."""
        found = _CODE.match(self._pattern, self._at)
        if found:
            self._at += len(found[0])
            return _code(chr(int(found[1] or found[2], 16)))
        letter = self._take()
        if letter in _SURELY:
            return letter
        if letter not in _CONTROLS and letter.isalnum():
            raise ValueError(f"'\\{letter}' is not read alike everywhere")
        return _code(_CONTROLS.get(letter, letter))

    @property
    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        self._at += 1
        return self._pattern[self._at - 1]

    def _took(self, character: str) -> bool:
        """Tell whether a character comes next, and go past it."""
        found = self._next == character
        self._at += found
        return found


def _code(character: str) -> _Item:
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise ValueError("it has half of a surrogate pair")
    return code, code


def _any_of(items: list[_Item]) -> Pattern:
    """Return the expression of one character out of some."""
    inside, alone = [], []
    for item in items:
        if isinstance(item, str):
            inside.append(_SURELY[item])
            continue
        plain = [(max(item[0], a), min(item[1], b)) for a, b in _PLAIN]
        plain = [(a, b) for a, b in plain if a <= b]
        if not plain or (len(items) == 1 and item[0] == item[1]):
            alone += [escape(json.dumps(chr(i), ensure_ascii=False)[1:-1]) for i in {*item}]
        else:
            inside += [rf"\x{{{a:x}}}-\x{{{b:x}}}" for a, b in plain]
    parts = [f"[{''.join(inside)}]"] if inside else []
    return Pattern(any_of([*parts, *alone]), 1, 1)


def _any_but(items: list[_Item]) -> Pattern:
    """Return the expression of one character but some."""
    but = "".join(
        _PERHAPS[item] if isinstance(item, str) else rf"\x{{{item[0]:x}}}-\x{{{item[1]:x}}}"
        for item in items
    )
    return Pattern(f"[^{_ESCAPED}{but}]", 1, 1)
