"""Patch: replace the activations at some positions by other values, row by row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.numbers import read_float32, read_int32, repeats
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.directions import orthonormal_basis
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer, along
from backbone_surgery.rewriting.units import (
    bind_units,
    check_same,
    check_units,
    named_units,
    read_units,
    units_of,
)

UNUSED = -1
"""A position that is none: nothing is patched there."""


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Patch(ControlledRewrite):
    """Patch activations: causal tracing, path patching, interchange interventions.

    Positions and values are run-time inputs, `generate(controls={name: {"positions": ...,
    "values": ...}})`. `positions` is int[n], int[batch, n] or int[batch, sites, n]: the numbers of
    tokens within their row, -1 for none. `values` is `{site path: float[n, ...] or float[batch, n,
    ...]}`, or the array alone if there is one site. Without the control nothing is patched. Other
    positions and values compile nothing; another n does.

    Where all sites have as many heads, `"heads"` may say which of them are patched: a mask
    float[sites, heads] or float[batch, sites, heads], 1 for those; a number or float[batch] is for
    those that are named here. Values are finite numbers of all heads; those of the others do not
    count.

    The inputs of the graph are `<name>_positions` int32[batch, sites, n] and, for the i-th site,
    `<name>_value_<i>` float32[batch, n, ...]; with `directions` also `<name>_basis`
    float32[batch, rank, size], and for heads `<name>_heads` float32[batch, sites, heads]. The
    default of a value is NaN throughout, which patches nothing.

    With `directions` only what they span is replaced: h becomes h + Bᵀ B (value - h), where the
    rows of B are an orthonormal basis. `find_subspace` finds such directions.

    Attributes:
        at: site selector; any site that has a value for each token, that is any but a pattern.
        positions: `"control"`, or a tuple of positions for every row, from 0 on. A call then passes
            values alone.
        name: name of the control.
        directions: float[size], or float[directions, size], at sites of as many numbers for each
            token; all of what stands there by default.
        heads: a head or a list of heads, at `query`, `key`, `value`, `head_outputs` and where else
            an architecture has them; all by default.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Patch("blocks.0")])
        >>> ids = np.ones((1, 3), "int32")
        >>> patch = {"patch_positions": np.array([[[2]]]), "patch_value_0": np.ones((1, 1, 8))}
        >>> tuple(edited({"token_ids": ids, "padding_mask": ids, **patch}).shape)
        (1, 3, 8)
    """

    at: str
    positions: str | tuple[int, ...] = "control"
    name: str = "patch"
    directions: Any = None
    heads: Any = None

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.span("directions", optional=True)
        if self.heads is not None:
            fields.keep("heads", read_units("heads", self.heads, fields))
            if self.directions is not None:
                raise SurgeryError(
                    f"{fields.where}: expected `heads`, or `directions` in the whole site. "
                    "Received both. Use one Patch for each."
                )
        if not isinstance(self.positions, str) or self.positions != "control":
            array = read_int32(self.positions, smallest=0)
            if array is None or array.ndim != 1 or not array.size or repeats(array):
                raise fields.refuse(
                    "positions from 0 on, each once, such as (0, 4), or 'control'",
                    self.positions,
                    "Count tokens from the first of the row; -1 for none goes into a call alone.",
                )
            fields.keep("positions", tuple(array.tolist()))

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = for_each_token(self.choose(surgery), "Patch")
        fixed = (UNUSED,) if isinstance(self.positions, str) else self.positions
        most = surgery.model.max_positions
        if most is not None and max(fixed) >= most:
            raise SurgeryError(
                f"Patch at '{self.at}': expected positions from 0 to {most - 1}, as many as the "
                f"model has learned. Received {max(fixed)}. Choose earlier tokens."
            )
        default = np.tile(np.array(fixed, "int32"), (len(places), 1))
        surgery.control(f"{self.name}_positions", default, (len(places), None))
        for i, place in enumerate(places):
            shape = place.shape[2:]
            none = np.broadcast_to(np.float32("nan"), (default.shape[-1], *shape))
            surgery.control(f"{self.name}_value_{i}", none, (None, *shape))
        self._declare_heads(places, surgery)
        if self.directions is not None:
            basis = orthonormal_basis(self.directions).astype("float32")
            surgery.control(f"{self.name}_basis", basis)
        return super().visitor(surgery)

    def _declare_heads(self, places: list[Place], surgery: Surgery) -> None:
        """Declare the control of heads, where all sites have as many of them."""
        units = {place.path: units_of(place) for place in places}
        if self.heads is not None:
            check_same(units, f"Patch at '{self.at}'")
            where = f"Patch at '{places[0].path}'"
            check_units("heads", self.heads, places[0], surgery, where)
        kind, count = units[places[0].path]
        if kind == "heads" and len({*units.values()}) == 1 and self.takes_whole:
            mask = named_units(self.heads, (len(places), count))
            surgery.control(f"{self.name}_heads", mask)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a patching layer at the site."""
        inputs, options = surgery.inputs, {"name": self.layer_name(place)}
        value = inputs[f"{self.name}_value_{surgery.index}"]
        given = x, surgery.positions, inputs[f"{self.name}_positions"], value
        basis = self.basis(value, surgery)
        if basis is None:
            heads = inputs.get(f"{self.name}_heads")
            of_heads = () if heads is None else (heads,)
            return Patching(surgery.index, **options)(*given, *of_heads)
        if tuple(x.shape[2:]) != tuple(basis.shape[2:]):
            raise SurgeryError(
                f"Patch at '{place.path}': expected directions of the size that stands there, "
                f"{list(x.shape[2:])}. Received directions of size {basis.shape[2]}. Choose a site "
                f"of that size. {surgery.sites_of((basis.shape[2],), place)}"
            )
        return SubspacePatching(surgery.index, **options)(*given, basis)

    @property
    def takes_whole(self) -> bool:
        """Whether all of what stands at a site is replaced, and not what directions span."""
        return self.directions is None

    def basis(self, value: keras.KerasTensor, surgery: Surgery) -> keras.KerasTensor | None:
        """Return the directions to patch along, float32[batch, rank, size], if not all."""
        return None if self.directions is None else surgery.inputs[f"{self.name}_basis"]

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind positions, values and heads; see the class."""
        if value is None:
            return {}
        where, heads_name = f"controls at '{self.name}'", f"{self.name}_heads"
        self._check_keys(value, heads_name in rows.shapes, where)
        positions = value.get("positions", self.positions)
        positions = _read_positions(positions, rows, where)
        values = value["values"]
        if not isinstance(values, Mapping) and len(rows.sites) == 1:
            values = {rows.sites[0]: values}
        bound = {f"{self.name}_positions": positions}
        _check_paths(values, rows.sites, where)
        for i, path in enumerate(rows.sites):
            name = f"{self.name}_value_{i}"
            shape = (*positions[:, i].shape, *rows.shapes[name][1:])
            bound[name] = _read_values(values[path], positions[:, i], shape, f"{where}, '{path}'")
        heads = value.get("heads")
        if heads is not None:
            where = f"{where}, 'heads' (a mask)"
            bound[heads_name] = bind_units(
                heads, self.heads, heads_name, rows, where, "patch a head"
            )
        return bound

    def _check_keys(self, value: Any, has_heads: bool, where: str) -> None:
        """Refuse what is no dict of what a call gives."""
        keys = ["values"] if self.positions != "control" else ["positions", "values"]
        more = {"heads"} if has_heads else set()
        if not isinstance(value, Mapping) or set(value) - more != set(keys):
            received = shown(list(value)) if isinstance(value, Mapping) else type(value).__name__
            maybe = ", and heads if not all" if has_heads else ""
            none = "There is no `heads`, unless all sites have as many of them. "
            raise SurgeryError(
                f"{where}: expected a dict of {' and '.join(keys)}{maybe}. Received {received}. "
                f"{'' if has_heads else none}See `Patch`."
            )


def for_each_token(places: list[Place], operation: str) -> list[Place]:
    """Return sites that can be patched; refuse attention patterns."""
    for place in places:
        if place.is_pattern:
            raise SurgeryError(
                f"{operation} at '{place.path}': expected sites with a value for each token. "
                "Received attention patterns, whose columns are other tokens. Patch `query`, "
                "`key` or `head_outputs`, or take heads out with `Ablate`."
            )
    return places


def _read_positions(value: Any, rows: Rows, where: str) -> np.ndarray:
    """Read positions as int32[batch, sites, n]."""
    batch, sites, most = rows.batch, len(rows.sites), rows.max_positions or 2**31
    array = read_int32(value, UNUSED, most - 1)
    if array is not None and array.ndim in (1, 2):
        array = array[None, None] if array.ndim == 1 else array[:, None]
    if (
        array is None
        or array.ndim != 3
        or array.shape[0] not in (1, batch)
        or array.shape[1] not in (1, sites)
        or not array.size
        or repeats(array)
    ):
        raise SurgeryError(
            f"{where}: expected positions int[n], int[{batch}, n] or int[{batch}, {sites}, n], "
            f"from 0 to {most - 1} or -1 for none, each once in a row. Received {shown(value)}. "
            "Count tokens from the first of the row."
        )
    array = np.broadcast_to(array, (batch, sites, array.shape[-1]))
    if rows.lengths is not None:
        _check_within(array, rows.lengths, where)
    return array


def _check_within(positions: np.ndarray, lengths: np.ndarray, where: str) -> None:
    """Refuse positions of tokens that are not run: nothing would be patched there."""
    last = positions.max(axis=(1, 2))
    row = int((last - lengths).argmax())
    if last[row] >= lengths[row]:
        raise SurgeryError(
            f"{where}: expected positions of tokens that are run, {lengths[row]} in row {row}, the "
            f"last one at {lengths[row] - 1}. Received {last[row]}. Pass -1 where a row is not "
            "patched."
        )


def _check_paths(values: Any, sites: tuple[str, ...], where: str) -> None:
    paths = list(values) if isinstance(values, Mapping) else [type(values).__name__]
    unknown = [path for path in paths if path not in sites]
    missing = [path for path in sites if path not in paths]
    if unknown or missing:
        amiss = (
            f"{shown(unknown[0])} is no patched site. {closest(unknown[0], sites)}"
            if unknown
            else ""
        )
        raise SurgeryError(
            f"{where}: expected values for exactly the patched sites. Received {shown(paths)}; "
            + (amiss or f"{shown(missing[0])} is missing. Pass what should stand there.")
        )


def _read_values(
    value: Any, positions: np.ndarray, shape: tuple[int, ...], where: str
) -> np.ndarray:
    """Read the values of one site as float32[batch, n, ...]; they count where it is patched."""
    array = read_float32(value)
    if array is None or array.shape not in (shape, shape[1:], (1, *shape[1:])):
        received = shown(value) if array is None else str(list(array.shape))
        raise SurgeryError(
            f"{where}: expected an array of shape {list(shape)}, or {list(shape[1:])} for all "
            f"rows. Received {received}. Pass one value for each position."
        )
    array = np.broadcast_to(array, shape)
    if not np.isfinite(array[positions != UNUSED]).all():
        raise SurgeryError(
            f"{where}: expected finite values. Received NaN or Inf at a position to patch. Pass "
            "-1 as the position of what is not patched; of heads that are not, pass zeros."
        )
    return array


class Patching(SiteLayer):
    """Patch one site.

    Args:
        index: which of the patched sites this is.

    Call arguments:
        x: float[batch, time, ...].
        positions: int32[batch, time], the number of each token.
        patched: int32[batch, sites, n], the positions to patch.
        value: float32[batch, n, ...]; NaN throughout where there is none.
        heads: float32[batch, sites, heads], 1 for those to patch; all, if left out.
    """

    def __init__(self, index: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.index = index

    def call(self, x, positions, patched, value, heads=None):
        """Take the value where a position is to be patched; leave all else exactly as it is."""
        is_patched, which = self.match(positions, patched, value)
        if heads is not None:
            of_head = ops.not_equal(heads[:, self.index], 0)
            is_patched = ops.logical_and(is_patched[..., None], of_head[:, None])
        return _chosen(x, value, is_patched, which)

    def match(self, positions, patched, value):
        """Tell which tokens are patched, bool[batch, time], and by which of the values, int32."""
        match = ops.equal(patched[:, self.index, :, None], positions[:, None, :])
        missing = ops.all(ops.isnan(value), axis=tuple(range(2, len(value.shape))))
        match = ops.logical_and(match, ops.logical_not(missing)[:, :, None])
        which = ops.cast(ops.argmax(ops.cast(match, "int32"), axis=1), "int32")
        return ops.any(match, axis=1), which


class SubspacePatching(Patching):
    """Patch what one site has along some directions.

    Call arguments:
        x: float[batch, time, size].
        positions: int32[batch, time], the number of each token.
        patched: int32[batch, sites, n], the positions to patch.
        value: float32[batch, n, size]; NaN throughout where there is none.
        basis: float32[batch, rank, size], with orthonormal rows.
    """

    def call(self, x, positions, patched, value, basis):
        """Take what the value has along the directions, and x across them."""
        is_patched, which = self.match(positions, patched, value)
        value = ops.where(ops.isnan(value), 0.0, value)
        h = ops.cast(x, "float32")
        change = ops.take_along_axis(value, which[..., None], axis=1) - h
        edited = h + along(change, basis)
        own = ops.arange(ops.shape(x)[1], dtype="int32")[None]
        return _chosen(x, edited, is_patched, own)


def _chosen(x, other, is_other, which):
    """Take some tokens from elsewhere, and leave all else exactly as it is.

    Args:
        x: float[batch, time, ...].
        other: float[batch, n, ...].
        is_other: bool[batch, time], which tokens; or bool[batch, time, heads].
        which: int32[batch or 1, time], the number of what stands there instead.
    """
    # One gather out of both, and no `where`: that would be compiled together with what makes x, and
    # round differently.
    time = ops.shape(x)[1]
    own = ops.arange(time, dtype="int32")[None]
    if len(is_other.shape) > 2:
        which, own = which[..., None], own[..., None]
    source = ops.where(is_other, time + which, own)
    missing = len(x.shape) - len(source.shape)
    source = ops.reshape(source, (*ops.shape(source), *[1] * missing))
    both = ops.concatenate([x, ops.cast(other, x.dtype)], axis=1)
    return ops.take_along_axis(both, source, axis=1)
