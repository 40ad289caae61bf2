"""Regular expressions of one text, of any of some others, and of repetitions."""

from collections.abc import Iterable

_META = frozenset(r"\.+*?()|[]{}^$#&-~")


def escape(text: str) -> str:
    """Return the regular expression of one text."""
    return "".join(f"\\{c}" if c in _META else c for c in text)


def any_of(parts: Iterable[str]) -> str:
    """Return the regular expression of any of some others."""
    return f"({'|'.join(parts)})"


def times(least: int, most: int | None) -> str:
    """Return how often something is repeated; if `most` is `None`, any number of times."""
    return f"{{{least},{'' if most is None else most}}}"
