"""Patch: put given values in place of the activations at some positions, row by row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, closest
from backbone_surgery.rewrites.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.site import Place

UNUSED = -1
"""A position that is none: nothing is patched there."""


@dataclass(frozen=True)
class Patch(SiteRewrite):
    """Patch activations: causal tracing, path patching, interchange interventions.

    What to patch comes in at run time, as `generate(controls={name: {"positions": ..., "values":
    ...}})`. `positions` is int[n], int[batch, n] or int[batch, sites, n]: the numbers of tokens
    within their row, -1 for none. `values` is `{site path: float[n, ...] or float[batch, n, ...]}`,
    or just the array where there is one site. Without the control nothing is patched. Another
    position or value compiles nothing, unless n is another.

    As inputs of the graph these are `<name>_positions` int32[batch, sites, n] and, for the i-th
    site, `<name>_value_<i>` float32[batch, n, ...]. A value left out is NaN throughout, and such a
    value patches nothing.

    Attributes:
        at: site selector; any site that has a value for each token, that is any but a pattern.
        positions: `"control"`, or a tuple of positions for every row, so that values alone are
            given at run time.
        name: name of the control.

    Example:
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

    def __post_init__(self) -> None:
        if self.positions != "control":
            self._checked_positions(self.positions, 1, 1)
            object.__setattr__(self, "positions", tuple(self.positions))

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        for place in places:
            if place.path.endswith("attention_pattern"):
                raise SurgeryError(
                    f"Patch at '{place.path}': expected sites with a value for each token. "
                    "Received attention patterns, whose columns are other tokens. Patch `query`, "
                    "`key` or `attention`, or take heads out with `Ablate`."
                )
        fixed = (UNUSED,) if self.positions == "control" else self.positions
        default = np.tile(np.array(fixed, "int32"), (len(places), 1))
        surgery.control(f"{self.name}_positions", default, (len(places), None))
        for i, place in enumerate(places):
            shape = place.tensor.shape[2:]
            none = np.broadcast_to(np.float32("nan"), (default.shape[-1], *shape))
            surgery.control(f"{self.name}_value_{i}", none, (None, *shape))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a patching layer at the site."""
        index = len(surgery.fired) - 1
        inputs = surgery.inputs
        layer = Patching(index, name=f"{self.name}_{place.path.replace('.', '_')}")
        value = inputs[f"{self.name}_value_{index}"]
        return layer(x, surgery.positions, inputs[f"{self.name}_positions"], value)

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind positions and values; see the class."""
        if value is None:
            return {}
        fixed = self.positions != "control"
        keys = {"values"} if fixed else {"positions", "values"}
        if not isinstance(value, Mapping) or set(value) != keys:
            raise SurgeryError(
                f"controls at '{self.name}': expected a dict of {' and '.join(sorted(keys))}. "
                f"Received {sorted(value) if isinstance(value, Mapping) else type(value).__name__}."
                " Pass both together; see `Patch`."
            )
        given = self.positions if fixed else value["positions"]
        positions = self._checked_positions(given, rows.batch, len(rows.sites))
        values = value["values"]
        if not isinstance(values, Mapping) and len(rows.sites) == 1:
            values = {rows.sites[0]: values}
        bound = {f"{self.name}_positions": positions}
        self._check_paths(values, rows.sites)
        for i, path in enumerate(rows.sites):
            name = f"{self.name}_value_{i}"
            wanted = (rows.batch, positions.shape[-1], *rows.shapes[name][1:])
            bound[name] = self._checked_values(values[path], path, wanted)
        return bound

    def _checked_positions(self, given: Any, batch: int, sites: int) -> np.ndarray:
        array = np.asarray(given)
        if array.ndim == 0 or array.dtype.kind not in "iu":
            array = np.empty(0)  # Refused below.
        if array.ndim == 2:
            array = array[:, None]
        shape = (batch, sites, array.shape[-1])
        fits = array.ndim in (1, 3) and array.size > 0
        fits = fits and all(
            a in (1, b) for a, b in zip(reversed(array.shape), reversed(shape), strict=False)
        )
        used = np.sort(array[array >= 0].reshape(-1)) if array.ndim == 1 else np.sort(array, -1)
        twice = fits and ((used[..., 1:] == used[..., :-1]) & (used[..., 1:] >= 0)).any()
        if not fits or twice or array.min() < UNUSED:
            raise SurgeryError(
                f"controls at '{self.name}': expected positions int[n], int[{batch}, n] or "
                f"int[{batch}, {sites}, n], from 0 on or -1 for none, each once in a row. Received "
                f"{given!r}. Count tokens from the first of the row."
            )
        return np.broadcast_to(array, shape).astype(np.int32)

    def _check_paths(self, values: Any, sites: tuple[str, ...]) -> None:
        found = list(values) if isinstance(values, Mapping) else [type(values).__name__]
        wrong = [path for path in found if path not in sites] or [
            path for path in sites if path not in found
        ]
        if wrong:
            raise SurgeryError(
                f"controls at '{self.name}': expected values for exactly the patched sites. "
                f"Received {found}; '{wrong[0]}' is amiss. {closest(wrong[0], sites)}"
            )

    def _checked_values(self, given: Any, path: str, wanted: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(given, "float32")
        if array.shape not in (wanted, wanted[1:], (1, *wanted[1:])):
            raise SurgeryError(
                f"controls at '{self.name}', values at '{path}': expected an array of shape "
                f"{list(wanted)}, or {list(wanted[1:])} for all rows. Received "
                f"{list(array.shape)}. Pass one value for each position."
            )
        return np.broadcast_to(array, wanted)


class Patching(keras.layers.Layer):
    """Patch one site.

    Args:
        index: which of the patched sites this is.

    Call arguments:
        x: float[batch, time, ...].
        positions: int32[batch, time], the number of each token.
        patched: int32[batch, sites, n], the positions to patch.
        value: float32[batch, n, ...]; NaN throughout where there is none.
    """

    def __init__(self, index: int, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.index = index

    def call(self, x, positions, patched, value):
        """Take the value where a position is to be patched; leave all else exactly as it is."""
        # One gather out of both, and no `where`: that would be compiled together with what makes x,
        # and round differently.
        match = ops.equal(patched[:, self.index, :, None], positions[:, None, :])
        missing = ops.all(ops.isnan(value), axis=tuple(range(2, len(value.shape))))
        match = ops.logical_and(match, ops.logical_not(missing)[:, :, None])
        time = ops.shape(x)[1]
        which = time + ops.cast(ops.argmax(ops.cast(match, "int32"), axis=1), "int32")
        own = ops.arange(time, dtype="int32")[None]
        source = ops.where(ops.any(match, axis=1), which, own)
        source = ops.reshape(source, (*ops.shape(source), *[1] * (len(x.shape) - 2)))
        both = ops.concatenate([x, ops.cast(value, x.dtype)], axis=1)
        return ops.take_along_axis(both, source, axis=1)

    def compute_output_spec(self, x, positions, patched, value):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)
