"""Condition: watch the hidden states for a direction, and let it decide which rows are steered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError
from backbone_surgery.graph.emission import emit
from backbone_surgery.numbers import read_number
from backbone_surgery.opening.site import Place
from backbone_surgery.opening.state import StateSpec, write_slots
from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.control import (
    Control,
    Tokens,
    default_tokens,
    range_before,
    read_thresholds,
    read_tokens,
    token_rows,
)
from backbone_surgery.rewriting.directions import read_directions
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.steering import in_range


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Condition(ControlledRewrite):
    """Decide for each row, while it runs, whether a `Steer` of its name applies to it.

    At each token, |cos(h, v)| between the hidden state and the condition vector is compared with
    the threshold. Once it is above, the condition stays met for the rest of the row. The condition
    can steer the blocks after the one that it watches. Threshold and direction are inputs of the
    graph: changing them compiles nothing.

    Source: conditional activation steering (CAST), Lee et al. 2024, arXiv:2409.05907.

    Attributes:
        name: name of the condition, for `Steer(when=name)` or `Steer(unless=name)`, and of its
            control: a threshold, for all rows or one for each, or a `Control` of threshold and
            tokens.
        vector: float[hidden_dim], or a control vector with a direction for the block watched.
        threshold: what the cosine has to exceed, from -1 to 1.
        at: selector of the one site that is watched.
        tokens: which tokens are watched, as of `Steer`. The greatest similarity among them
            decides, so leave out a special token that begins every text: `(1, None)`.
        signed: whether to compare cos(h, v) instead of its absolute value: for vectors that point
            one way in rows that meet the condition and the other way in the rest.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.
    """

    name: str
    vector: Any
    threshold: float
    at: str
    tokens: Tokens = "all"
    signed: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.selector()
        fields.flag("signed")
        threshold = read_number(self.threshold)
        if threshold is None or abs(threshold) > 1:
            raise fields.refuse("a threshold from -1 to 1", self.threshold, "Pass a cosine.")
        fields.keep("threshold", threshold)
        fields.keep("tokens", read_tokens(self.tokens, fields.where))
        if hasattr(self.vector, "directions"):
            read_directions(self.vector, fields.where)
        elif isinstance(self.vector, Mapping):
            fields.keep("vector", read_directions(self.vector, fields.where))
        else:
            fields.keep("vector", read_directions({0: self.vector}, fields.where)[0])
            self._check_direction(self.vector)

    @property
    def _where(self) -> str:
        return f"Condition at '{self.name}'"

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the one site that is watched."""
        chosen = surgery.select(self.at)
        if len(chosen) != 1:
            raise SurgeryError(
                f"{self._where}: expected one site to watch. Received '{self.at}', which selects "
                f"{[p.path for p in chosen]}. Name one of them."
            )
        return chosen

    def visitor(self, surgery: Surgery) -> Any:
        """Declare the controls, then visit the site."""
        direction = self._direction(self.choose(surgery)[0])
        surgery.control(f"{self.name}_direction", direction)
        surgery.control(f"{self.name}_threshold", np.float32(self.threshold))
        surgery.control(f"{self.name}_tokens", default_tokens(self.tokens))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Watch the site, and emit whether the condition is met."""
        direction = surgery.inputs[f"{self.name}_direction"]
        if x.shape[2:] != direction.shape[1:]:
            raise SurgeryError(
                f"{self._where}: expected a vector of the size that stands at '{place.path}', "
                f"{x.shape[2:]}. Received one of size {direction.shape[1:]}. Use a vector made for "
                f"this model. {surgery.sites_of(tuple(direction.shape[1:]), place)}"
            )
        parts = [surgery.inputs[f"{self.name}_{part}"] for part in ("threshold", "tokens")]
        watch = Watch(self.signed, name=f"watch_{self.name}")
        is_met = watch(x, surgery.positions, surgery.padding_mask, direction, *parts)
        emit(self.name, Latch(name=f"condition_{self.name}")(is_met))
        return x

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what watches tokens from `end` on."""
        tokens = range_before(bound[f"{self.name}_tokens"], end)
        if tokens is None:
            return {f"{self.name}_{p}": np.zeros(0) for p in ("direction", "threshold", "tokens")}
        return {f"{self.name}_tokens": tokens}

    def _check_direction(self, direction: np.ndarray) -> np.ndarray:
        if not direction.any():
            raise SurgeryError(
                f"{self._where}: expected a direction other than zero. Received zeros, which are "
                "similar to nothing. Pass another one."
            )
        return direction

    def _direction(self, place: Place) -> np.ndarray:
        if isinstance(self.vector, np.ndarray):
            return self.vector
        directions = read_directions(self.vector, self._where)
        if place.block not in directions:
            raise SurgeryError(
                f"{self._where}: expected a direction for the block watched, {place.block}. "
                f"Received directions for blocks {list(directions)}. Watch one of these, or pass "
                "one array."
            )
        return self._check_direction(directions[place.block])

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a threshold, or a `Control`. `None` takes the fields of the rewrite."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Control) else Control()
        control.check_only(("threshold", "tokens"), where, "Condition")
        threshold = control.threshold if isinstance(value, Control) else value
        threshold = self.threshold if threshold is None else threshold
        tokens = self.tokens if control.tokens is None else control.tokens
        read_thresholds(threshold, where)
        return {
            f"{self.name}_threshold": bind_amounts(threshold, where, rows.batch),
            f"{self.name}_tokens": token_rows(tokens, rows.prompt_lengths, where),
        }


class Watch(keras.layers.Layer):
    """Compare hidden states with a direction, token by token.

    Args:
        signed: see `Condition`.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        padding_mask: int or bool[batch, time].
        direction: float32[batch, hidden_dim].
        threshold: float32[batch].
        tokens: int32[batch, 3], as of `SteeringScale`.

    Returns:
        bool[batch, time].
    """

    def __init__(self, signed: bool, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.signed = signed

    def call(self, x, positions, padding_mask, direction, threshold, tokens):
        """Compare cosines with the threshold, in range and not in padding."""
        h = ops.cast(x, "float32")
        direction = direction[:, None, :]
        norms = ops.sum(ops.square(h), axis=-1) * ops.sum(ops.square(direction), axis=-1)
        cosine = ops.sum(h * direction, axis=-1) / ops.maximum(ops.sqrt(norms), 1e-12)
        if not self.signed:
            cosine = ops.abs(cosine)
        watched = ops.logical_and(in_range(positions, tokens), ops.cast(padding_mask, "bool"))
        return ops.logical_and(watched, cosine > threshold[:, None])

    def compute_output_spec(self, x, *others):
        """One flag for each token."""
        return keras.KerasTensor(x.shape[:2], "bool")


class Latch(keras.layers.Layer):
    """Tell for each token whether the condition was met at it or before it in its row.

    Call arguments:
        is_met: bool[batch, time], whether the condition is met at each token.

    Returns:
        bool[batch, time].
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, is_met):
        """Accumulate along the row."""
        return ops.cumsum(ops.cast(is_met, "int32"), axis=1) > 0

    def compute_output_spec(self, is_met):
        """One flag for each token."""
        return keras.KerasTensor(is_met.shape, "bool")

    def state_specs(self, is_met):
        """Keep one flag for each token, so that a text can be taken up again at any slot."""
        return (StateSpec("is_met", (None, None), "bool", slot_axis=1),)

    def call_with_state(self, is_met, state, cache_update_index):
        """Accumulate along the row, from what the slots before hold."""
        slots = ops.arange(ops.shape(state["is_met"])[1], dtype="int32")
        before = ops.logical_and(state["is_met"], (slots < cache_update_index)[None])
        was_met = ops.logical_or(self.call(is_met), ops.any(before, axis=1, keepdims=True))
        return was_met, {"is_met": write_slots(state["is_met"], cache_update_index, is_met)}
