"""What the library raises: one base class, and a few kinds a caller may want to tell apart.

Every message has the same shape: the operation, what was expected, what was received, and what
to do about it.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np


class SurgeryError(ValueError):
    """Something cannot be done as asked.

    Wrong arguments are refused before anything is compiled or written. What only a run can show,
    such as logits that are no numbers, is raised when it is seen.
    """


class UnknownArchitectureError(SurgeryError):
    """The graph holds no decoder block that a family knows how to open."""


class SelectorError(SurgeryError):
    """A site selector is malformed or matches nothing."""


class CacheMismatchError(SurgeryError):
    """The cached graph and the uncached one give different results: do not generate with it."""


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


PAST_FLOAT16 = "If that is float16, which ends at 65,504, load the model in bfloat16 or float32."
"""What to do about NaN of a model, after the dtype that it computes in."""


def closest(name: object, known: Iterable[object]) -> str:
    """Return a hint such as `Did you mean 'key'? Known: key, value.` for an unknown name."""
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{hint}Known: {', '.join(names) if names else '(none)'}."


def shown(value: object, longest: int = 200) -> str:
    """Return a value as an error shows it: an array by its dtype and shape, and nothing at length.

    Args:
        value: the value.
        longest: how many characters of it are shown.

    Examples:
        >>> import numpy as np
        >>> shown("all"), shown(np.zeros((2, 32), "float32"))
        ("'all'", 'an array float32[2, 32]')
    """
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"an array {value.dtype}{list(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object that cannot show itself
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."


def shown_array(value: Any) -> str:
    """Return an array as an error shows it, by its dtype and shape; anything else as it is.

    Examples:
        >>> shown_array(np.zeros(2)), shown_array("all")
        ('float64[2]', "'all'")
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return shown(value)


def plain(error: BaseException) -> str:
    r"""Return the words of an error without the codes for bold and colours that Keras puts in.

    Examples:
        >>> plain(ValueError("\x1b[1mno such block\x1b[0m"))
        'no such block'
    """
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def shown_ids(value: Any) -> str:
    """Return token ids as an error shows them, with the smallest and the largest of them.

    Examples:
        >>> shown_ids(np.array([[1, 999]])), shown_ids([0.5])
        ('int64[1, 2], from 1 to 999', '[0.5]')
    """
    try:
        ids = np.asarray(value)
    except Exception:  # whatever the conversion of an object runs into
        return shown_array(value)
    if ids.dtype.kind not in "iu" or not ids.size:
        return shown_array(value)
    return f"{shown_array(ids)}, from {ids.min()} to {ids.max()}"
