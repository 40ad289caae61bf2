"""Ablate: knock out heads, or whole sites, by zero, by a mean or by activations of other texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.attention import SelfAttention
from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.amounts import bind_amounts
from backbone_surgery.rewrites.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.site import Place

_PATTERN = "attention_pattern"


@dataclass(frozen=True, eq=False)
class Ablate(SiteRewrite):
    """Ablate sites, or some attention heads of them.

    Which heads are out is a control, for each row: a number or float[batch] switches the heads
    named here on (1) or off (0), and float[batch, sites, heads] says it for each head, where a
    site without heads counts as one. What is not ablated stays bit-equal.

    With `to="mean"`, the mean over a reference set of texts stands in (`Captures.mean()` gives it).
    With `to="resample"`, activations of reference texts stand in: the token at position p takes
    entry (start + p) of `values`, counted in a circle, and `start` is given for each row by
    `controls={name: {"start": int[batch]}}`. So a row does not depend on the rest of its batch.

    Attributes:
        at: site selector. Heads are counted at `query`, `key`, `value`, `attention` and
            `attention_pattern`. Patterns can be ablated to zero only.
        heads: which heads; `None` means all, or the whole site.
        to: `"zero"`, `"mean"` or `"resample"`.
        values: for a mean `{site path: float[...]}`, with the shape of one token at the site; for
            resampling `{site path: float[entries, ...]}`.
        name: name of the control.

    Example:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> bs.operate(backbone, [bs.Ablate("blocks.*.attention", heads=[1])]).report[0].sites
        ('blocks.0.attention', 'blocks.1.attention')
    """

    at: str
    heads: Any = None
    to: Literal["zero", "mean", "resample"] = "zero"
    values: Mapping[str, Any] | None = None
    name: str = "ablate"

    def __post_init__(self) -> None:
        if np.ndim(self.heads) == 1:
            object.__setattr__(self, "heads", tuple(self.heads))
        if self.to not in ("zero", "mean", "resample") or (self.values is None) != (
            self.to == "zero"
        ):
            raise SurgeryError(
                f"Ablate at '{self.at}': expected to='zero' without `values`, or 'mean' or "
                f"'resample' with them. Received {self.to!r} and values "
                f"{'given' if self.values is not None else 'missing'}. `Captures.mean()` gives "
                "means."
            )

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        units = {place.path: _units(place) for place in places}
        if len(set(units.values())) > 1:
            raise SurgeryError(
                f"Ablate at '{self.at}': expected sites with as many heads each. Received {units}. "
                "Use one Ablate for each kind of site."
            )
        mask = np.zeros((len(places), units[places[0].path]), "float32")
        mask[:, self._heads(places[0], mask.shape[1], surgery)] = 1
        surgery.control(f"{self.name}_heads", mask)
        if self.to == "resample":
            surgery.control(f"{self.name}_start", np.int32(0))
        return super().visitor(surgery)

    def _heads(self, place: Place, count: int, surgery: Surgery) -> Any:
        if self.heads is None:
            return slice(None)
        heads = list(np.atleast_1d(self.heads))
        has_heads = _has_heads(place)
        known = all(isinstance(h, int | np.integer) and 0 <= h < count for h in heads)
        if not has_heads or not known or not heads:
            what = f"heads from 0 to {count - 1}" if has_heads else "no heads, since it has none"
            block = place.block or 0
            near = [p.path for p in surgery.places if p.block == block and _has_heads(p)]
            raise SurgeryError(
                f"Ablate at '{place.path}': expected {what}. Received {self.heads!r}. Pass "
                f"`heads=None` for the whole site; sites with heads are {', '.join(near)}."
            )
        return heads

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put an ablating layer at the site."""
        index = len(surgery.fired) - 1
        name = f"{self.name}_{place.path.replace('.', '_')}"
        axis = 1 if place.path.endswith(_PATTERN) else 2
        layer = Ablating(index, axis, self._pool(place), name=name)
        mask = surgery.inputs[f"{self.name}_heads"]
        if self.to == "zero":
            return layer(x, mask)
        if self.to == "mean":
            return layer(x, mask, surgery.positions)
        return layer(x, mask, surgery.positions, surgery.inputs[f"{self.name}_start"])

    def _pool(self, place: Place) -> np.ndarray | None:
        """Return what may stand in at a site, float32[entries, ...]."""
        if self.values is None:
            return None
        shape = tuple(place.tensor.shape[2:])
        value = np.asarray(self.values.get(place.path, np.zeros(0)), "float32")
        pool = value[None] if self.to == "mean" else value
        if place.path.endswith(_PATTERN) or pool.shape[1:] != shape or not len(pool):
            wanted = "zero" if place.path.endswith(_PATTERN) else list(shape)
            raise SurgeryError(
                f"Ablate at '{place.path}': expected values of shape {wanted} for {self.to!r}, "
                f"with entries first to resample. Received {list(value.shape)} among values for "
                f"{sorted(self.values)}. Take them from captures of the same site."
            )
        return pool

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind which heads are out, and where resampling starts; see the class."""
        given = value if isinstance(value, Mapping) else {"heads": value}
        known = {"heads", "start"} if self.to == "resample" else {"heads"}
        if not set(given) <= known:
            raise SurgeryError(
                f"controls at '{self.name}': expected {' or '.join(sorted(known))}. Received "
                f"{sorted(given)}. See `Ablate`."
            )
        bound = {}
        name = f"{self.name}_heads"
        if given.get("heads") is not None:
            mask = bind_amounts(self.name, given["heads"], rows, rows.shapes[name])
            self._check(np.isin(mask, (0, 1)), "1 (out) or 0 for each head", given["heads"])
            by_head = np.ndim(given["heads"]) == 3
            bound[name] = mask if by_head else mask * rows.defaults[name]
        if given.get("start") is not None:
            start = bind_amounts(f"{self.name} start", given["start"], rows, ())
            self._check(start == np.round(start), "a whole number as `start`", given["start"])
            bound[f"{self.name}_start"] = start.astype(np.int32)
        return bound

    def _check(self, right: np.ndarray, wanted: str, given: Any) -> None:
        if not right.all():
            raise SurgeryError(
                f"controls at '{self.name}': expected {wanted}. Received {given!r}. Pass whole "
                "numbers; nothing is ablated in part."
            )


def _has_heads(place: Place) -> bool:
    return place.path.endswith(_PATTERN) or len(place.tensor.shape) == 4


def _units(place: Place) -> int:
    """How many heads a site has; one for a site without."""
    shape = place.tensor.shape
    if place.path.endswith(_PATTERN):
        whole = isinstance(graph.node_of(place.tensor).operation, SelfAttention)
        return shape[2] if whole else shape[1]
    return shape[2] if len(shape) == 4 else 1


class Ablating(keras.layers.Layer):
    """Ablate one site.

    Args:
        index: which of the ablated sites this is.
        axis: which axis of `x` counts heads, if any does.
        pool: what may stand in, float32[entries, ...]; `None` for zeros.

    Call arguments:
        x: float[batch, time, ...], or a pattern float[batch, heads, time, keys].
        mask: float32[batch, sites, heads], not zero for what is out.
        positions: int32[batch, time], the number of each token.
        start: int32[batch], the entry for the token at position 0; zero by default.
    """

    def __init__(self, index: int, axis: int, pool: np.ndarray | None, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.index, self.axis, self.pool = index, axis, None
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
        """Replace what is out; leave all else exactly as it is."""
        mask = ops.not_equal(mask[:, self.index], 0)
        if len(x.shape) == 3:
            mask = mask[:, None]
        else:
            mask = mask[:, :, None, None] if self.axis == 1 else mask[:, None, :, None]
        if self.pool is None:
            other = ops.zeros_like(x)
        else:
            offset = 0 if start is None else start[:, None]
            entries = ops.mod(positions + offset, self.pool.shape[0])
            other = ops.cast(ops.take(self.pool, entries, axis=0), x.dtype)
        return ops.where(mask, other, x)

    def compute_output_spec(self, x, mask, positions=None, start=None):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)
