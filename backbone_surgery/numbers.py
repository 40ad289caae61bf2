"""Numbers: what may be passed where one is asked for.

Python's and NumPy's numbers are taken alike. Booleans are not numbers, nor is text, nor an object
that only converts to a number. The readers return `None` for these, so that the caller can say what
it expected; the checks say it themselves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown

_KINDS = ("int", "uint", "float", "bfloat")
"""What the names of dtypes of numbers begin with; `ml_dtypes` has no kinds."""


def is_int(value: Any) -> bool:
    """Tell whether a value is one integer, of Python or NumPy, and no boolean.

    Examples:
        >>> [is_int(value) for value in (3, np.int64(3), True, 3.0, "3")]
        [True, True, False, False, False]
    """
    # A span of time counts as an integer to NumPy.
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def read_array(value: Any) -> np.ndarray | None:
    """Read an array of integers or floats.

    Examples:
        >>> read_array([1, 2]).dtype.kind, read_array([[1], [2, 3]]), read_array([1, True])
        ('i', None, None)
    """
    try:
        array = np.asarray(value)
    except Exception:  # whatever the conversion of an object runs into
        return None
    return array if array.dtype.name.startswith(_KINDS) and not _holds_bool(value) else None


def read_float32(value: Any) -> np.ndarray | None:
    """Read an array of numbers as float32; what is too large for it becomes infinite."""
    array = read_array(value)
    if array is None:
        return None
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def read_finite(value: Any) -> np.ndarray | None:
    """Read an array of numbers that are all finite in float32, at least one."""
    array = read_float32(value)
    return array if array is not None and array.size and np.isfinite(array).all() else None


def read_int32(value: Any, smallest: int, largest: int = 2**31 - 1) -> np.ndarray | None:
    """Read an array of integers as int32; `None` too where one of them is out of range.

    Examples:
        >>> read_int32([0, 5], smallest=0).dtype.name, read_int32(2**32, smallest=0)
        ('int32', None)
    """
    array = read_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return array.astype(np.int32) if ((smallest <= array) & (array <= largest)).all() else None


def repeats(indices: np.ndarray) -> bool:
    """Tell whether an index from 0 on is there twice in a row of int[..., n].

    Examples:
        >>> repeats(np.array([[3, -1, -1], [0, 1, 2]])), repeats(np.array([4, 5, 4]))
        (False, True)
    """
    ordered = np.sort(indices, axis=-1)
    return bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


def read_mask(value: Any) -> np.ndarray | None:
    """Read an array of booleans, or of numbers that are 0 or 1.

    Examples:
        >>> read_mask([1, 0]).tolist(), read_mask([1, 2])
        ([True, False], None)
    """
    try:
        array = np.asarray(value)
    except Exception:  # as above
        return None
    if array.dtype == bool:
        return array
    numbers = array if array.dtype.name.startswith(_KINDS) else None
    return None if numbers is None or not np.isin(numbers, (0, 1)).all() else numbers.astype(bool)


def read_number(value: Any) -> float | None:
    """Read one number that is finite in float32.

    Examples:
        >>> [read_number(value) for value in (2, np.float32(0.5), float("nan"), 1e99, None, [1.0])]
        [2.0, 0.5, None, None, None, None]
    """
    array = read_finite(value)
    return float(np.asarray(value)) if array is not None and array.ndim == 0 else None


def read_as(dtype: str, value: Any) -> np.ndarray | None:
    """Read an array for an input of a dtype; `None` where a value does not fit into it."""
    if dtype == "bool":
        return read_mask(value)
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        array = read_int32(value, max(limits.min, -(2**31)), min(limits.max, 2**31 - 1))
    elif "float" in dtype:
        array = read_float32(value)
    else:
        array = read_array(value)
    return None if array is None else array.astype(dtype)


def fits(shape: Sequence[int | None], wanted: Sequence[int | None]) -> bool:
    """Tell whether a shape is one that is wanted, of which `None` is any size.

    Examples:
        >>> fits((3, 8), (None, 8)), fits((8,), (None, 8))
        (True, False)
    """
    if len(shape) != len(wanted):
        return False
    return all(n is None or n == size for n, size in zip(wanted, shape, strict=True))


def check_count(operation: str, name: str, value: Any, unit: str) -> None:
    """Refuse what is no positive int that an int32 holds; `unit` is what it counts."""
    if not is_int(value) or not 1 <= value < 2**31:
        raise SurgeryError(
            f"{operation} at '{name}': expected a positive int. Received {shown(value)}. Pass a "
            f"number of {unit}."
        )


def check_flag(operation: str, name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool | np.bool_) and not is_int(value):
        raise SurgeryError(
            f"{operation} at '{name}': expected True or False. Received {shown(value)}. Pass one."
        )


def _holds_bool(value: Any) -> bool:
    """Tell whether a list holds a boolean: NumPy turns one that stands among numbers into one."""
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
