"""Knockout: cut attention edges, so that some tokens no longer look at some others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.site import PATTERN, Place
from backbone_surgery.rewriting.ablate import read_units
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.control import (
    Tokens,
    default_tokens,
    range_before,
    read_tokens,
    token_rows,
)
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.site_layer import SiteLayer
from backbone_surgery.rewriting.steering import in_range

_PARTS = ("heads", "queries", "keys")


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Knockout(ControlledRewrite):
    """Knock out attention from some tokens to others.

    The result is as if the scores of these edges were minus infinity before the softmax: what is
    left of a row of the pattern is scaled up to what the whole row summed to. A token that is left
    nowhere to look gets zeros from that head. Rows that lose nothing stay bit-equal.

    Which tokens and which heads are inputs of the graph, row by row. A call may give them as
    `controls={name: value}`:

    * a number or float[batch]: 1 cuts the edges of the heads named here, 0 leaves them;
    * float[batch, sites, heads]: the same for each head;
    * `{"heads": ..., "queries": ..., "keys": ...}`: one of these as `heads`, and tokens as a
      `Control` takes them, for all rows or a list of one for each: `"last"` and negative positions
      count from the end of the prompt.

    Source: attention knockout, Geva et al. 2023, arXiv:2304.14767.

    Attributes:
        name: name of the control.
        queries: which tokens no longer look, as the tokens of `Steer`.
        keys: at which tokens.
        at: selector of attention patterns.
        heads: a head or a list of heads; `None` means all.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Knockout("cut", queries=(3, None), keys=(0, 2))])
        >>> edited.report[0].sites
        ('blocks.0.attention_pattern', 'blocks.1.attention_pattern')
    """

    name: str
    queries: Tokens = "all"
    keys: Tokens = "all"
    at: str = f"blocks.*.{PATTERN}"
    heads: Any = None

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.selector()
        for field in ("queries", "keys"):
            fields.keep(field, read_tokens(getattr(self, field), f"{fields.where}, `{field}`"))
        if self.heads is not None:
            fields.keep("heads", read_units("heads", self.heads, fields))

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        counts = {place.path: place.shape[1] for place in places if place.is_pattern}
        heads = self.heads or (0,)
        wrong = [p.path for p in places if not p.is_pattern or counts[p.path] <= max(heads)]
        if wrong or len(set(counts.values())) > 1:
            raise SurgeryError(
                f"Knockout at '{self.at}': expected attention patterns of as many heads each, with "
                f"heads {list(heads)}. Received {wrong or counts}. Select some of "
                f"'blocks.*.{PATTERN}'."
            )
        mask = np.zeros((len(places), counts[places[0].path]), "float32")
        mask[:, slice(None) if self.heads is None else list(self.heads)] = 1
        surgery.control(f"{self.name}_heads", mask)
        surgery.control(f"{self.name}_queries", default_tokens(self.queries))
        surgery.control(f"{self.name}_keys", default_tokens(self.keys))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a layer at the pattern that cuts edges."""
        sums_to_one = getattr(place.nodes[-1].operation, "sinks", None) is None
        layer = KnockingOut(surgery.index, sums_to_one, name=self.layer_name(place))
        parts = [surgery.inputs[f"{self.name}_{part}"] for part in _PARTS]
        return layer(x, surgery.positions, *parts)

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what cuts edges from tokens from `end` on alone, or none."""
        tokens = {part: range_before(bound[f"{self.name}_{part}"], end) for part in _PARTS[1:]}
        ranges = {f"{self.name}_{part}": x for part, x in tokens.items() if x is not None}
        if len(ranges) < len(tokens) or not bound[f"{self.name}_heads"].any():
            return {f"{self.name}_{part}": np.zeros(0) for part in _PARTS}
        return ranges

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind heads, and tokens; see the class."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Mapping) else {"heads": value}
        if not set(control) <= set(_PARTS):
            raise SurgeryError(
                f"{where}: expected {', '.join(_PARTS)}. Received {shown(list(control))}. See "
                "`Knockout`."
            )
        bound = {}
        for part in _PARTS[1:]:
            given = control.get(part)
            tokens = getattr(self, part) if given is None else given
            bound[f"{self.name}_{part}"] = token_rows(tokens, rows.prompt_lengths, where)
        heads, name = control.get("heads"), f"{self.name}_heads"
        if heads is not None:
            mask = bind_amounts(heads, where, rows.batch, rows.shapes[name])
            if not np.isin(mask, (0, 1)).all():
                raise SurgeryError(
                    f"{where}: expected 1 to knock out the edges of a head, 0 to leave them. "
                    f"Received {shown(heads)}. Pass whole numbers; no edge is cut in part."
                )
            bound[name] = mask if np.ndim(heads) == 3 else mask * rows.defaults[name]
        return bound


class KnockingOut(SiteLayer):
    """Cut edges of one attention pattern.

    Args:
        index: which of the patterns this is.
        sums_to_one: whether its rows do. Else they leave a share for a sink.

    Call arguments:
        x: float[batch, heads, time, keys].
        positions: int32[batch, time].
        heads: float32[batch, sites, heads]: 1 cuts, 0 leaves.
        queries: int32[batch, 3], as of `SteeringScale`.
        keys: int32[batch, 3].
    """

    def __init__(self, index: int, sums_to_one: bool, **kwargs) -> None:
        super().__init__(**kwargs)
        self.index, self.sums_to_one = index, sums_to_one

    def call(self, x, positions, heads, queries, keys):
        """Cut edges among the tokens of one pass."""
        return self._cut(x, positions, positions, heads, queries, keys)

    def state_specs(self, *args):
        """Keep nothing: the tokens in the slots of a cache are counted."""
        return ()

    def call_with_state(self, x, positions, heads, queries, keys, state, cache_mask):
        """Cut edges from new tokens to those of the cache."""
        numbers = ops.cumsum(ops.cast(cache_mask, "int32"), axis=1) - 1
        return self._cut(x, positions, numbers, heads, queries, keys), state

    def _cut(self, x, positions, key_positions, heads, queries, keys):
        of_head = ops.not_equal(heads[:, self.index, :, None, None], 0)
        looks = in_range(positions, queries)[:, None, :, None]
        is_cut = of_head & looks & in_range(key_positions, keys)[:, None, None, :]
        pattern = ops.cast(x, "float32")
        lost = ops.where(is_cut, pattern, 0.0)
        kept = pattern - lost
        left = kept if self.sums_to_one else lost
        left = ops.sum(left, axis=-1, keepdims=True)
        left = left if self.sums_to_one else 1.0 - left
        scaled = ops.where(left > 0, kept / ops.where(left > 0, left, 1.0), 0.0)
        loses = ops.any(ops.not_equal(lost, 0), axis=-1, keepdims=True)
        return ops.where(loses, ops.cast(scaled, x.dtype), x)
