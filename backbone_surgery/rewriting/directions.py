"""Directions: control vectors as arrays, one direction for each block."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int, read_finite, read_float32

_LAST_BLOCK = 999_999
"""What files of control vectors have names for."""


def read_directions(vector: Any, where: str) -> dict[int, np.ndarray]:
    """Read a control vector as `{block: float32[hidden_dim]}`: finite, and all of one size.

    Args:
        vector: a `ControlVector`, or `{block: array}`.
        where: for the error.

    Returns:
        New arrays, in the order of the blocks.
    """
    directions = getattr(vector, "directions", vector)
    if not isinstance(directions, Mapping) or not directions:
        raise SurgeryError(
            f"{where}: expected a vector that maps blocks to directions. Received {shown(vector)}. "
            "Pass a ControlVector or {block: array}."
        )
    wrong = [block for block in directions if not is_int(block) or not 0 <= block <= _LAST_BLOCK]
    if wrong:
        raise SurgeryError(
            f"{where}: expected blocks counted from 0, each an integer of at most {_LAST_BLOCK}. "
            f"Received {shown(wrong)}. Count from the first block."
        )
    arrays = {int(block): read_float32(x) for block, x in directions.items()}
    shapes = {"no numbers" if x is None else str(list(x.shape)) for x in arrays.values()}
    checked = {block: x.copy() for block, x in sorted(arrays.items()) if x is not None and x.size}
    if len(shapes) > 1 or len(checked) < len(arrays) or next(iter(checked.values())).ndim != 1:
        raise SurgeryError(
            f"{where}: expected a vector that maps blocks to directions float[hidden_dim], all of "
            f"one size. Received shapes {', '.join(sorted(shapes))}. Pass {{block: array}}."
        )
    broken = [block for block, x in checked.items() if not np.isfinite(x).all()]
    if broken:
        raise SurgeryError(
            f"{where}: expected finite directions. Received NaN or Inf in those of blocks "
            f"{broken}. Train the vector again."
        )
    return checked


def orthonormal_basis(directions: np.ndarray) -> np.ndarray:
    """Return orthonormal rows with the span of some directions: float64[rank, hidden_dim].

    Args:
        directions: float[directions, hidden_dim], at least one of them not zero.
    """
    rows = np.asarray(directions, "float64")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    kept = norms[:, 0] > 0
    _, sizes, basis = np.linalg.svd(rows[kept] / norms[kept], full_matrices=False)
    return basis[sizes > 1e-6]  # of dependent ones, what they span


def read_span(value: Any) -> np.ndarray | None:
    """Read directions that span something.

    Args:
        value: float[hidden_dim], or float[directions, hidden_dim].

    Returns:
        float64[directions, hidden_dim], or `None` where it is none, or one of them is zero.
    """
    read = read_finite(value)
    rows = None if read is None or not read.ndim else np.atleast_2d(read)
    return None if rows is None or rows.ndim != 2 or not rows.any(axis=1).all() else rows


def basis_rows(value: Any, batch: int, rank: int, hidden_dim: int, where: str) -> np.ndarray:
    """Return what some directions span, for each row: float32[batch, rank, hidden_dim].

    Where they span less, the rest is zero.

    Args:
        value: what `read_span` reads, a list of that for each row, or
            float[batch, directions, hidden_dim]. A list of lists is one for each row.
        batch: how many rows there are.
        rank: how many dimensions they span at most.
        hidden_dim: their size.
        where: for the error.
    """
    is_for_all = read_span(value) is not None and not _is_nested(value)
    listed = [value] if is_for_all else value
    spans = [read_span(one) for one in listed] if np.iterable(listed) else []
    read = [x for x in spans if x is not None and x.shape[1] == hidden_dim]
    wanted = 1 if is_for_all else batch
    if len(read) != wanted or len(spans) != wanted:
        raise SurgeryError(
            f"{where}: expected directions as a list of {batch}, one for each row, each finite "
            f"float[{hidden_dim}] or float[directions, {hidden_dim}], none of them zero; or an "
            f"array of either shape, for all rows. Received {shown(value)}. Pass one of these."
        )
    bases = [orthonormal_basis(rows) for rows in read]
    most = max(len(basis) for basis in bases)
    if most > rank:
        raise SurgeryError(
            f"{where}: expected directions that span at most {rank} dimensions, as those of the "
            f"rewrite do. Received some that span {most}. Build the rewrite with as many."
        )
    padded = [np.pad(basis, ((0, rank - len(basis)), (0, 0))) for basis in bases]
    return np.broadcast_to(np.stack(padded).astype("float32"), (batch, rank, hidden_dim))


def _is_nested(value: Any) -> bool:
    """Tell whether a list holds more than numbers."""
    return isinstance(value, list | tuple) and np.ndim(value[0]) > 0


def direction_rows(
    value: Any, batch: int, blocks: Sequence[int], hidden_dim: int, where: str
) -> np.ndarray:
    """Return directions float32[batch, blocks, hidden_dim]."""
    check_directions(value, where)
    wanted = (batch, len(blocks), hidden_dim)
    if _is_vector(value):
        return np.broadcast_to(_one_vector(value, blocks, hidden_dim, where), wanted)
    if isinstance(value, list | tuple) and len(value) == batch:
        return np.stack([_one_vector(v, blocks, hidden_dim, where) for v in value])
    array = None if isinstance(value, list | tuple) else read_float32(value)
    if array is not None and array.shape in (wanted, wanted[1:]):
        return np.broadcast_to(array, wanted)
    raise SurgeryError(
        f"{where}: expected directions as a control vector, a list of {batch} (one for each row), "
        f"or finite float{list(wanted)}. Received {shown(value)}. Pass one of these."
    )


def check_any_directions(value: Any, where: str) -> None:
    """Refuse what is of use to no rewrite: neither to `direction_rows` nor to `basis_rows`."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if read_span(value) is not None or (listed and all(read_span(x) is not None for x in listed)):
        return
    array = None if isinstance(value, list | tuple) else read_finite(value)
    if array is not None and array.ndim in (2, 3):
        return
    if listed and all(_is_vector(one) for one in listed):
        check_directions(value, where)
        return
    raise SurgeryError(
        f"{where}: expected directions as a control vector, finite float[hidden_dim], which is not "
        "zero, or float[directions, hidden_dim], a list of one of these for each row, or "
        f"float[batch, blocks, hidden_dim]. Received {shown(value)}. Pass one of these."
    )


def check_directions(value: Any, where: str) -> None:
    """Refuse what holds directions for no number of rows and blocks."""
    if _is_vector(value):
        read_directions(value, where)
    elif isinstance(value, list | tuple) and value:
        for vector in value:
            read_directions(vector, where)
    else:
        array = read_finite(value)
        if array is None or array.ndim not in (2, 3):
            raise SurgeryError(
                f"{where}: expected directions as a control vector, a list of one for each row, or "
                f"finite float[batch, blocks, hidden_dim]. Received {shown(value)}. Pass one of "
                "these."
            )


def _is_vector(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "directions")


def _one_vector(value: Any, blocks: Sequence[int], hidden_dim: int, where: str) -> np.ndarray:
    """Return the directions of some blocks, zero for those that the vector leaves out."""
    directions = read_directions(value, where)
    size = len(next(iter(directions.values())))
    extra = sorted(set(directions) - set(blocks))
    if extra or size != hidden_dim:
        raise SurgeryError(
            f"{where}: expected directions of size {hidden_dim} for the steered blocks "
            f"{list(blocks)}. Received size {size}, for blocks {list(directions)}. Use a vector "
            "made for this model, and drop the other blocks."
        )
    zero = np.zeros(hidden_dim, "float32")
    return np.stack([directions.get(block, zero) for block in blocks])
