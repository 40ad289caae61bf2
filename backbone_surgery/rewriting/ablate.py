"""Ablate: knock out heads, experts or sites, by zero, a mean or the activations of other texts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.numbers import read_finite, read_int32
from backbone_surgery.opening.experts import EXPERT_WEIGHTS, ROUTER
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer
from backbone_surgery.rewriting.units import (
    bind_units,
    check_same,
    check_units,
    named_units,
    read_units,
    role_of,
    units_of,
)

_FURTHEST = 2**30
"""Where resampling may start: the position of a token can be added without leaving int32."""


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Ablate(ControlledRewrite):
    """Ablate sites, or some attention heads or experts of them.

    Which of them are ablated is a control, row by row. A number or float[batch] acts on those named
    here: 1 ablates them, 0 leaves them. float[batch, sites, heads] says it for each head, or
    float[batch, sites, experts] for each expert, where a site without either counts as one; without
    the first axis for all rows. What is not ablated stays bit-equal.

    What stands in for an ablated activation:

    * `to="zero"`: zeros. At `router`, where zero is a logit like any other, it is minus infinity:
      the expert is never chosen, and the next best takes its place. One `Ablate` must leave some;
      where several together leave none, the experts give zero. At `expert_weights` an expert that
      was chosen counts nothing, and none takes its place.
    * `to="mean"`: the mean over a reference set of texts, as `GeneratedActivations.mean()` gives
      it.
    * `to="resample"`: the activations of reference texts. The token at position p takes entry
      (start + p) of `values`, counted in a circle. `controls={name: {"start": int[batch]}}`
      gives each row its `start`, so a row does not depend on the rest of its batch.

    Attributes:
        at: site selector. Heads are counted at `query`, `key`, `value`, `head_outputs`,
            `attention_pattern`, and where an architecture has them `output_gate`, `state`, `decay`
            and `write_strength`; experts at `router` and `expert_weights`. Patterns can be ablated
            to zero only.
        heads: a head or a list of heads; `None` means all, or the whole site.
        experts: an expert or a list of experts; `None` means all.
        to: `"zero"`, `"mean"` or `"resample"`.
        values: for a mean `{site path: float[...]}`, with the shape of one token at the site; for
            resampling `{site path: float[entries, ...]}`.
        name: name of the control.
        amount: the default of the control: 1 ablates, 0 leaves all until a call says otherwise.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> bs.operate(backbone, [bs.Ablate("blocks.*.head_outputs", heads=[1])]).report[0].sites
        ('blocks.0.head_outputs', 'blocks.1.head_outputs')
    """

    at: str
    heads: Any = None
    experts: Any = None
    to: Literal["zero", "mean", "resample"] = "zero"
    values: Mapping[str, Any] | None = None
    name: str = "ablate"
    amount: float = 1

    def __post_init__(self) -> None:
        fields = Fields(self)
        fields.selector()
        fields.name()
        fields.choice("to", ("zero", "mean", "resample"))
        fields.all_or_nothing("amount")
        for field in ("heads", "experts"):
            if getattr(self, field) is not None:
                fields.keep(field, read_units(field, getattr(self, field), fields))
        if self.heads is not None and self.experts is not None:
            both = {"heads": self.heads, "experts": self.experts}
            raise fields.refuse("`heads` or `experts`", both, "Use one `Ablate` for each.")
        if (self.values is None) != (self.to == "zero"):
            raise SurgeryError(
                f"{fields.where}: expected to='zero' without `values`, or 'mean' or 'resample' "
                f"with them. Received {self.to!r} and {'no ' if self.values is None else ''}"
                "values. `GeneratedActivations.mean()` gives means."
            )
        if self.values is not None:
            fields.keep("values", _read_values(self.values, fields))

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        units = {place.path: units_of(place) for place in places}
        where = f"Ablate at '{self.at}'"
        check_same(units, where)
        kind, count = units_of(places[0])
        field = "heads" if self.experts is None else "experts"
        check_units(field, self._named, places[0], surgery, f"Ablate at '{places[0].path}'")
        mask = named_units(self._named, (len(places), count))
        self._check_choice(mask, units, where)
        surgery.control(f"{self.name}_{_counted(kind)}", self.amount * mask)
        if self.to == "resample":
            surgery.control(f"{self.name}_start", np.int32(0))
        return super().visitor(surgery)

    @property
    def _named(self) -> tuple[int, ...] | None:
        """The heads or experts that are named here; `None` if that is all."""
        return self.heads if self.experts is None else self.experts

    def _check_choice(self, mask: np.ndarray, paths: Iterable[str], where: str) -> None:
        """Refuse to leave a router no expert to choose; the mask is [..., sites, experts]."""
        routers = [i for i, path in enumerate(paths) if role_of(path) == ROUTER]
        if self.to == "zero" and mask[..., routers, :].all(axis=-1).any():
            raise SurgeryError(
                f"{where}: expected experts to be left for the router to choose. Received all "
                f"{mask.shape[-1]} to be ablated. Name some of them by `experts`, or ablate "
                f"'{EXPERT_WEIGHTS}', where none need be left."
            )

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put an ablating layer at the site."""
        axis = 1 if place.is_pattern else 2
        nothing = -np.inf if role_of(place.path) == ROUTER else 0.0
        name = self.layer_name(place)
        layer = Ablating(surgery.index, axis, self._pool(place), nothing, name=name)
        mask = surgery.inputs[f"{self.name}_{_counted(units_of(place)[0])}"]
        if self.to == "zero":
            return layer(x, mask)
        if self.to == "mean":
            return layer(x, mask, surgery.positions)
        return layer(x, mask, surgery.positions, surgery.inputs[f"{self.name}_start"])

    def _pool(self, place: Place) -> np.ndarray | None:
        """Return what may stand in at a site, float32[entries, ...]."""
        if self.values is None:
            return None
        shape = tuple(place.shape[2:])
        value = self.values.get(place.path)
        if value is None:
            raise SurgeryError(
                f"Ablate at '{place.path}': expected values for each site that '{self.at}' "
                f"selects. Received some for {sorted(self.values)}. Take them from captures of the "
                "same sites."
            )
        pool = value[None] if self.to == "mean" else value
        if place.is_pattern or pool.shape[1:] != shape or not len(pool):
            rule = "zero" if place.is_pattern else list(shape)
            raise SurgeryError(
                f"Ablate at '{place.path}': expected values of shape {rule} for {self.to!r}, "
                f"with entries first to resample. Received {list(value.shape)}. Take them from "
                "captures of the same site."
            )
        return pool

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind which heads are ablated, and where resampling starts; see the class."""
        counted = "experts" if f"{self.name}_experts" in rows.shapes else "heads"
        control = value if isinstance(value, Mapping) else {counted: value}
        where = f"controls at '{self.name}'"
        keys = [counted, "start"] if self.to == "resample" else [counted]
        if not set(control) <= set(keys):
            more = "" if self.to == "resample" else ", and `start` where it resamples"
            raise SurgeryError(
                f"{where}: expected {' or '.join(keys)}{more}. Received {shown(list(control))}. "
                "See `Ablate`."
            )
        bound = {}
        units, start = control.get(counted), control.get("start")
        if units is not None:
            name = f"{self.name}_{counted}"
            act = "ablate an expert" if counted == "experts" else "ablate a head"
            bound[name] = bind_units(units, self._named, name, rows, where, act)
            self._check_choice(bound[name], rows.sites, where)
        if start is not None:
            starts = read_int32(start, -_FURTHEST, _FURTHEST)
            if starts is None or starts.shape not in ((), (1,), (rows.batch,)):
                raise SurgeryError(
                    f"{where}: expected a whole number as `start`, or [{rows.batch}] (one for each "
                    f"row), up to {_FURTHEST} in size. Received {shown(start)}. Pass integers."
                )
            bound[f"{self.name}_start"] = np.broadcast_to(starts, rows.batch)
        return bound


def _read_values(values: Any, fields: Fields) -> dict[str, np.ndarray]:
    read = {k: read_finite(v) for k, v in values.items()} if isinstance(values, Mapping) else {}
    arrays = {path: x for path, x in read.items() if x is not None and isinstance(path, str)}
    if not read or len(arrays) < len(read):
        raise fields.refuse(
            "`values` to be {site path: array of finite numbers}",
            values,
            "Take them from captures of the same site.",
        )
    return arrays


def _counted(kind: str) -> str:
    """Return the end of the name of the input for sites that count this, or nothing."""
    return kind or "heads"


class Ablating(SiteLayer):
    """Ablate one site.

    Args:
        index: which of the ablated sites this is.
        axis: which axis of `x` counts heads, if any does.
        pool: what may stand in, float32[entries, ...]; `None` for one number.
        nothing: that number.

    Call arguments:
        x: float[batch, time, ...], or a pattern float[batch, heads, time, keys].
        mask: float32[batch, sites, heads] or [batch, sites, experts]: 1 ablates, 0 leaves.
        positions: int32[batch, time], the number of each token.
        start: int32[batch], the entry for the token at position 0; zero by default.
    """

    def __init__(
        self, index: int, axis: int, pool: np.ndarray | None, nothing: float = 0.0, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.index, self.axis, self.pool, self.nothing = index, axis, None, nothing
        self.keeps_zeros = pool is None and nothing == 0
        if pool is not None:
            self.pool = self.add_weight(
                name="pool",
                shape=pool.shape,
                dtype="float32",
                initializer="zeros",
                trainable=False,
                autocast=False,
            )
            self.pool.assign(pool)

    def call(self, x, mask, positions=None, start=None):
        """Replace what is ablated; leave all else exactly as it is."""
        mask = ops.not_equal(mask[:, self.index], 0)
        mask = ops.expand_dims(mask, tuple(i for i in range(1, len(x.shape)) if i != self.axis))
        if self.pool is None:
            other = ops.full_like(x, self.nothing)
        else:
            offset = 0 if start is None else start[:, None]
            entries = (positions + offset) % self.pool.shape[0]
            other = ops.cast(ops.take(self.pool, entries, axis=0), x.dtype)
        return ops.where(mask, other, x)
