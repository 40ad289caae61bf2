"""What the library raises: one base class, and a few kinds a caller may want to tell apart.

Every message has the same shape: the operation, what was expected, what was received, and what
to do about it.
"""

import difflib
from collections.abc import Iterable


class SurgeryError(ValueError):
    """Bad input to a surgery: raised before anything is compiled, written or changed."""


class UnknownArchitectureError(SurgeryError):
    """The graph holds no decoder block that a family knows how to open."""


class SelectorError(SurgeryError):
    """A site selector is malformed or matches nothing."""


class CacheMismatchError(SurgeryError):
    """The cached graph and the uncached one disagree, so it must not be used to generate."""


class WeightMismatchError(SurgeryError):
    """Two sets of weights do not match; nothing was written.

    Attributes:
        report: the `TransferReport` with every difference, or `None`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class RecipeError(SurgeryError):
    """A recipe is damaged, unknown or does not fit; nothing was built from it."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as `Did you mean 'key'? Known: key, value.` for an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{hint}Known: {', '.join(known) if known else '(none)'}."
