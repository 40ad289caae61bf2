"""Amounts: from what a user passes for a control to one number for each row and site."""

from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.rewrite import Rows


def bind_amounts(name: str, value: Any, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast a number, an array [batch], or one of all axes, to float32[batch, *shape].

    Args:
        name: name of the control, for the error.
        value: what was passed.
        rows: the rows.
        shape: of one row, such as (sites,) or (sites, heads).

    Raises:
        SurgeryError: another shape, or a number that is not finite.
    """
    wanted = (rows.batch, *shape)
    try:
        given = np.asarray(value, "float32")
    except (TypeError, ValueError):
        given = np.full((), np.nan, "float32")
    if given.ndim == 1:
        given = given.reshape(-1, *(1 for _ in shape))
    fits = given.ndim in (0, len(wanted)) and all(
        size in (1, full) for size, full in zip(given.shape, wanted, strict=False)
    )
    if not fits or not np.isfinite(given).all():
        raise SurgeryError(
            f"controls at '{name}': expected finite numbers: one, [{rows.batch}] (one for each "
            f"row) or {list(wanted)} (rows first, then sites). Received {value!r}. Pass one of "
            "these."
        )
    return np.broadcast_to(given, wanted)
