"""Regular expressions as they are handed to `outlines-core`: without anchors, and without NUL.

The automaton that it makes also looks for matches that begin inside of a text, which may take
exponentially many states. So a NUL is put before and behind an expression, and nothing inside of it
may be one: then a match begins in one place.
"""

import re

_NUL = r"\x00"
_ANCHORS = "AzZbBG<>"
_OTHERS = "DSWpP"
"""Escapes that stand for all characters but some, NUL among them, or may do so."""

_HEX = re.compile(r"\\[xuU](\{0*\}|0+(?![0-9a-fA-F]))")
_PROPERTY = re.compile(r"\\[pP](\{[^}]*\}|.)", re.DOTALL)
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(-[a-zA-Z]+)?([:)])")


def without_nul(regex: str) -> str:
    """Return an expression that matches the same texts but those with a NUL.

    Args:
        regex: in the syntax of the Rust crate `regex`, of which this knows what it needs to.

    Raises:
        ValueError: it has an anchor, a flag that changes what is written, or odd brackets.
    """
    parts: list[str] = []
    at, depth, dot = 0, 0, rf"[^\n{_NUL}]"
    if "\0" in regex:
        raise ValueError("no text has a character 0")
    while at < len(regex):
        character = regex[at]
        if character == "\\":
            part, text = _escape(regex, at)
        elif character == "[":
            part = text = regex[at : _end_of_class(regex, at)]
            text = rf"[{part}--{_NUL}]"
        else:
            part = text = character
            dot = _dot(regex, at, dot)
            depth += (character == "(") - (character == ")")
            if character in "^$":
                raise ValueError("it has an anchor, which is not needed")
            if character == ".":
                text = dot
        if depth < 0:
            raise ValueError("a bracket is closed that was not opened")
        parts.append(text)
        at += len(part)
    return "".join(parts)


def _escape(regex: str, at: int) -> tuple[str, str]:
    """Return the escape that begins somewhere, and what to write for it."""
    kind = regex[at + 1 : at + 2]
    if kind and kind in _ANCHORS:
        raise ValueError("it has an anchor, which is not needed")
    if _HEX.match(regex, at):
        raise ValueError("no text has a character 0")
    found = _PROPERTY.match(regex, at)
    part = found[0] if found else regex[at : at + 2]
    return part, rf"[{part}--{_NUL}]" if kind and kind in _OTHERS else part


def _end_of_class(regex: str, start: int) -> int:
    """Return where the class of characters that begins somewhere has ended."""
    at, depth = start, 0
    while at < len(regex):
        if regex[at] == "\\":
            at += 1
        elif regex[at] == "[":
            depth += 1
            at += regex[at + 1 : at + 2] == "^"
            at += regex[at + 1 : at + 2] == "]"  # there it is a character
        elif regex[at] == "]":
            depth -= 1
        at += 1
        if not depth:
            return at
    raise ValueError("a class of characters has no end")


def _dot(regex: str, at: int, dot: str) -> str:
    """Return what to write for a dot, after flags that may stand somewhere."""
    found = _FLAGS.match(regex, at)
    if found is None:
        return dot
    flags = set(found[1]) | set(found[2] or "")
    if flags & set("xuR") or ("s" in flags and (at or found[3] == ":" or found[2])):
        raise ValueError("of flags it may have i, m and U, and at its beginning (?s)")
    return rf"[^{_NUL}]" if "s" in flags else dot
