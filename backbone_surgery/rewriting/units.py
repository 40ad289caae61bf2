"""Units: the heads or experts that sites have, those that a rewrite names, and masks of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import is_int, read_int32
from backbone_surgery.opening.experts import EXPERT_WEIGHTS, ROUTER
from backbone_surgery.opening.recurrence import DECAY, WRITE_STRENGTH
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import Rows, Surgery


def role_of(path: str) -> str:
    """Return what a site is within its block, such as `"query"`."""
    return path.rpartition(".")[2]


def units_of(place: Place) -> tuple[str, int]:
    """Return what a site counts, `heads` or `experts`, and how many; ("", 1) for another site."""
    shape, role = place.shape, role_of(place.path)
    if role in (ROUTER, EXPERT_WEIGHTS):
        return "experts", shape[2]
    has_heads = len(shape) > 3 or role in (DECAY, WRITE_STRENGTH)
    return ("heads", shape[1 if place.is_pattern else 2]) if has_heads else ("", 1)


def read_units(field: str, value: Any, fields: Fields) -> tuple[int, ...]:
    """Read which `heads` or `experts` a rewrite names, one or a list."""
    listed = [value] if is_int(value) else value
    array = read_int32(listed, smallest=0)
    if array is None or array.ndim != 1 or not len(array):
        one = f"`{field}` to be {'a head' if field == 'heads' else 'an expert'}"
        raise fields.refuse(
            f"{one}, counted from 0, or a list of them", value, "Pass `[0, 2]`, say."
        )
    return tuple(array.tolist())


def named_units(units: Sequence[int] | None, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask float32[sites, heads] of some heads or experts; `None` means all."""
    mask = np.zeros(shape, "float32")
    mask[:, slice(None) if units is None else list(units)] = 1
    return mask


def check_units(
    field: str, named: Sequence[int] | None, place: Place, surgery: Surgery, where: str
) -> None:
    """Refuse heads or experts that a site has not.

    Args:
        field: `"heads"` or `"experts"`.
        named: those that the rewrite names; `None` for all.
        place: the site.
        surgery: that the rewrite is part of.
        where: for the error, such as `Ablate at 'blocks.1.query'`.
    """
    if named is None:
        return
    kind, count = units_of(place)
    if kind != field or max(named) >= count:
        others = f"{count} {kind}" if kind else "none"
        rule = f"no {field}, since it has {others}"
        rule = f"{field} from 0 to {count - 1}" if kind == field else rule
        block = place.block or 0
        near = [p.path for p in surgery.places if p.block == block and units_of(p)[0] == field]
        raise SurgeryError(
            f"{where}: expected {rule}. Received {shown(list(named))}. Pass `{field}=None` for the "
            f"whole site; sites with {field} are {', '.join(near) or 'none'}."
        )


def check_same(units: Mapping[str, tuple[str, int]], where: str) -> None:
    """Refuse sites, `{path: units_of(place)}`, that one mask of units does not fit."""
    if len(set(units.values())) > 1:
        listed = {
            path: f"{count} {kind}" if kind else "none" for path, (kind, count) in units.items()
        }
        raise SurgeryError(
            f"{where}: expected sites with as many heads each, or experts. Received {listed}. Use "
            "one rewrite for each kind of site."
        )


def bind_units(
    value: Any, named: Sequence[int] | None, name: str, rows: Rows, where: str, act: str
) -> np.ndarray:
    """Read which units of each row and site a call means, as float32[batch, sites, units].

    Args:
        value: a number or float[batch], for those that the rewrite names; or a mask
            float[sites, units] or float[batch, sites, units].
        named: those; `None` for all.
        name: of the input of the graph.
        rows: see `Rows`.
        where: for the error.
        act: what 1 does to one, such as `"ablate a head"`.
    """
    mask = bind_amounts(value, where, rows.batch, rows.shapes[name])
    if not np.isin(mask, (0, 1)).all():
        raise SurgeryError(
            f"{where}: expected 1 to {act}, 0 to leave it. Received {shown(value)}. Pass whole "
            "numbers; nothing is done in part."
        )
    return mask if np.ndim(value) > 1 else mask * named_units(named, rows.shapes[name])
