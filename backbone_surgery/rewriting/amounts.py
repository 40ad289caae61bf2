"""Amounts: from what a user passes for a control to one number for each row and site."""

from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import read_finite


def bind_amounts(
    value: Any, where: str, batch: int, shape: tuple[int, ...] = (), or_else: str = ""
) -> np.ndarray:
    """Broadcast a number, an array [batch], or one of all axes, to float32[batch, *shape].

    Where a row has several axes, an array of these alone is for all rows.

    Args:
        value: what was passed.
        where: for the error, such as `controls at 'skip'`.
        batch: how many rows there are.
        shape: of one row, such as (sites,) or (sites, heads).
        or_else: what else the caller accepts, for the error.

    Raises:
        SurgeryError: another shape, or numbers that are not finite, or no numbers.
    """
    wanted = (batch, *shape)
    array = read_finite(value)
    if array is not None and array.ndim == 1:
        array = array.reshape(-1, *(1 for _ in shape))
    if array is not None and len(shape) > 1 and array.shape == shape:
        array = array[None]
    if array is None or not _fits(array, wanted):
        in_full = f" or {list(wanted)} (rows first, then sites)" if shape else ""
        if len(shape) > 1:
            in_full = f", {list(shape)} (for all rows){in_full}"
        raise SurgeryError(
            f"{where}: expected finite numbers: one, [{batch}] (one for each row){in_full}"
            f"{or_else}. Received {shown(value)}. Pass one of these."
        )
    return np.broadcast_to(array, wanted)


def _fits(array: np.ndarray, wanted: tuple[int, ...]) -> bool:
    """Tell whether an array is one number, or has all axes, each in full or of size one."""
    pairs = zip(array.shape, wanted, strict=False)
    return array.ndim in (0, len(wanted)) and all(size in (1, full) for size, full in pairs)
