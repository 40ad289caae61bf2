"""Knockout: cut attention edges, so that some tokens no longer look at some others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.attention import AttentionPattern
from backbone_surgery.opening.site import PATTERN, Place
from backbone_surgery.rewriting.control import (
    Control,
    Tokens,
    default_tokens,
    range_before,
    read_tokens,
    token_rows,
)
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.steering import in_range
from backbone_surgery.rewriting.units import bind_units, named_units, read_units

_PARTS = ("heads", "queries", "keys")


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Knockout(ControlledRewrite):
    """Knock out attention from some tokens to others.

    Their scores have no part in the softmax, as if they were minus infinity. A token that is left
    nowhere to look gets zeros from that head. Rows that lose nothing stay bit-equal. What other
    rewrites do to the same pattern comes after, in whatever order they are listed.

    Which tokens and which heads are inputs of the graph, row by row. A call may give them as
    `controls={name: value}`:

    * a number or float[batch]: 1 cuts the edges of the heads named here, 0 leaves them;
    * float[batch, sites, heads], or float[sites, heads] for all rows: the same for each head;
    * `{"heads": ..., "queries": ..., "keys": ...}`: one of these as `heads`, 1 if left out, and
      tokens as a `Control` takes them, for all rows or a list of one for each.

    Source: attention knockout, Geva et al. 2023, arXiv:2304.14767.

    Attributes:
        name: name of the control.
        queries: which tokens no longer look, as the tokens of `Steer`.
        keys: at which tokens.
        at: selector of attention patterns.
        heads: a head or a list of heads; `None` means all.
        amount: the default of the control: 1 cuts the edges, 0 leaves them until a call cuts them.

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
    amount: float = 1

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.selector()
        for field in ("queries", "keys"):
            fields.keep(field, read_tokens(getattr(self, field), f"{fields.where}, `{field}`"))
        if _never_meet(self.queries, self.keys):
            raise SurgeryError(
                f"{fields.where}: expected keys that queries can look at, which are tokens before "
                f"them. Received queries {self.queries!r} and keys {self.keys!r}. "
                "Exchange them."
            )
        if self.heads is not None:
            fields.keep("heads", read_units("heads", self.heads, fields))
        fields.all_or_nothing("amount")

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        counts = {place.path: place.shape[1] for place in places if place.is_pattern}
        others = [place.path for place in places if not place.is_pattern]
        if others or len(set(counts.values())) > 1:
            raise SurgeryError(
                f"Knockout at '{self.at}': expected attention patterns of as many heads each. "
                f"Received {others or counts}. Select some of 'blocks.*.{PATTERN}'."
            )
        count = counts[places[0].path]
        if self.heads is not None and max(self.heads) >= count:
            raise SurgeryError(
                f"Knockout at '{self.at}': expected heads from 0 to {count - 1}. Received "
                f"{list(self.heads)}. Name others, or leave `heads` out for all."
            )
        mask = named_units(self.heads, (len(places), count))
        surgery.control(f"{self.name}_heads", self.amount * mask)
        surgery.control(f"{self.name}_queries", default_tokens(self.queries))
        surgery.control(f"{self.name}_keys", default_tokens(self.keys))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Have the layer that makes the pattern leave edges out."""
        node = graph.node_of(x)
        args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
        if not isinstance(node.operation, AttentionPattern):
            # What other rewrites made of the pattern: they do so after the softmax.
            if not args or not isinstance(args[0], keras.KerasTensor):
                raise SurgeryError(
                    f"Knockout at '{place.path}': expected a pattern that attention made. Received "
                    f"what '{node.operation.name}' made. Put the Knockout first."
                )
            before = self.apply(args[0], place, surgery)
            return graph.repeat(node, (before, *args[1:]), kwargs)[0]
        others = [kwargs["cut"]] if kwargs.get("cut") is not None else []
        parts = [surgery.inputs[f"{self.name}_{part}"] for part in _PARTS]
        cut = CutEdges(surgery.index, name=self.layer_name(place))
        kwargs["cut"] = cut(surgery.positions, *parts, *others)
        return graph.repeat(node, args, kwargs)[0]

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
        if not set(control) <= set(_PARTS) or isinstance(value, Control):
            received = "a Control" if isinstance(value, Control) else shown(list(control))
            raise SurgeryError(
                f"{where}: expected a dict of some of {', '.join(_PARTS)}. Received {received}. "
                "See `Knockout`."
            )
        bound = {}
        for part in _PARTS[1:]:
            given = control.get(part)
            tokens = getattr(self, part) if given is None else given
            name = f"{self.name}_{part}"
            bound[name] = token_rows(tokens, rows.prompt_lengths, f"{where}, `{part}`")
        # Who names tokens in a call wants their edges to be cut.
        heads = control.get("heads", 1 if control.keys() & {"queries", "keys"} else None)
        name = f"{self.name}_heads"
        if heads is not None:
            act = "knock out the edges of a head"
            bound[name] = bind_units(heads, self.heads, name, rows, where, act)
        return bound


def _never_meet(queries: Tokens, keys: Tokens) -> bool:
    """Tell whether all keys come after all queries, whatever the prompt: there is no such edge."""
    if isinstance(queries, str) or isinstance(keys, str):
        return queries in ("prompt", "last") and keys == "generated"
    (start, end), (first, stop) = queries, keys
    is_fixed = all(x is None or x >= 0 for x in (start, end, first, stop))
    return is_fixed and end is not None and (first or 0) >= end


class CutEdges(keras.layers.Layer):
    """Tell which edges of one attention pattern are cut.

    Args:
        index: which of the patterns this is.

    Call arguments:
        positions: int32[batch, time].
        heads: float32[batch, sites, heads]: 1 cuts, 0 leaves.
        queries: int32[batch, 3], as of `SteeringScale`.
        keys: int32[batch, 3].
        others: bool[batch, heads, time, keys], which are cut already; none, if left out.

    Returns:
        bool[batch, heads, time, keys].
    """

    def __init__(self, index: int, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.index = index

    def call(self, positions, heads, queries, keys, others=None):
        """Name edges among the tokens of one pass."""
        return self._cut(positions, positions, heads, queries, keys, others)

    def compute_output_spec(self, positions, heads, queries, keys, others=None):
        """One flag for each edge."""
        batch, time = positions.shape
        return keras.KerasTensor((batch, heads.shape[2], time, time), "bool")

    def state_specs(self, *args, **kwargs):
        """Keep nothing: the tokens in the slots of a cache are counted."""
        return ()

    def call_with_state(self, positions, heads, queries, keys, state, cache_mask, others=None):
        """Name edges from new tokens to those of the cache."""
        numbers = ops.cumsum(ops.cast(cache_mask, "int32"), axis=1) - 1
        return self._cut(positions, numbers, heads, queries, keys, others), state

    def _cut(self, positions, key_positions, heads, queries, keys, others):
        of_head = ops.not_equal(heads[:, self.index, :, None, None], 0)
        looks = in_range(positions, queries)[:, None, :, None]
        is_cut = of_head & looks & in_range(key_positions, keys)[:, None, None, :]
        return is_cut if others is None else is_cut | others
