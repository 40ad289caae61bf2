"""Steer: add a direction to the hidden states, or take it out, by a strength given at run time."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.control import (
    LAST,
    SCHEDULE_STEPS,
    Control,
    Tokens,
    direction_rows,
    read_directions,
    strength_rows,
    token_range,
    token_rows,
)
from backbone_surgery.rewrites.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.site import Place


@dataclass(frozen=True)
class Steer(SiteRewrite):
    """Add a control vector at some sites.

    The strength of each row and steered block, the directions themselves, the range of tokens and
    the schedule over generated tokens are inputs of the graph: changing them compiles nothing. A
    strength of 0 is bit-equal to no edit. Several of them stack.

    Attributes:
        name: name of the control, for `generate(controls={name: strength})`.
        vector: a `ControlVector`, or `{block: float[hidden_dim]}`. A direction for a block that is
            not among the sites of `at` is an error.
        at: site selector; the sites with a direction are steered.
        tokens: which tokens: `"all"`, `"prompt"`, `"generated"`, or positions `(start, stop)`
            counted from the first token of the row.
        mode: `"add"` gives h + s·v, `"ablate"` gives h - s·v̂(v̂·h) with v̂ of unit norm.
        renormalize: whether to scale the result back to the norm of h, computed in float32.
        strength: where the control is not given.
        when: name of a `Condition` before it in the list; a row is steered from the token on at
            which its condition is met.
    """

    name: str
    vector: Any
    at: str = "blocks.*"
    tokens: Tokens = "all"
    mode: Literal["add", "ablate"] = "add"
    renormalize: bool = False
    strength: float = 1.0
    when: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("add", "ablate"):
            raise SurgeryError(
                f"Steer at '{self.name}': expected mode 'add' or 'ablate'. Received {self.mode!r}. "
                "Choose one of them."
            )
        token_range(self.tokens, 1, self._where)
        directions = read_directions(self.vector, self._where)
        if not hasattr(self.vector, "directions"):
            object.__setattr__(self, "vector", directions)

    @property
    def _where(self) -> str:
        return f"Steer at '{self.name}'"

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    @property
    def directions(self) -> dict[int, np.ndarray]:
        """The direction of each steered block, in the order of the blocks."""
        return read_directions(self.vector, self._where)

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the selected sites that have a direction."""
        selected = surgery.select(self.at)
        directions = self.directions
        missing = set(directions) - {p.block for p in selected}
        if missing:
            raise SurgeryError(
                f"Steer at '{self.at}': expected a direction only for blocks among the selected "
                f"sites {[p.path for p in selected]}. Received directions for blocks "
                f"{sorted(missing)} too. Drop them, or select more sites."
            )
        chosen = [p for p in selected if p.block in directions]
        blocks = [p.block for p in chosen]
        if len(set(blocks)) < len(blocks):
            raise SurgeryError(
                f"Steer at '{self.at}': expected one site in each block. Received "
                f"{[p.path for p in chosen]}. Use one Steer for each kind of site."
            )
        return chosen

    def visitor(self, surgery: Surgery) -> Any:
        """Declare the controls, then visit the sites."""
        self.choose(surgery)
        self._check_hint(surgery)
        directions = np.stack(list(self.directions.values()))
        default_range = token_range(self.tokens, LAST, self._where)
        surgery.control(f"{self.name}_strength", np.full(len(directions), self.strength, "float32"))
        surgery.control(f"{self.name}_directions", directions)
        surgery.control(f"{self.name}_tokens", np.array([*default_range, LAST], "int32"))
        schedule = np.ones(1 + SCHEDULE_STEPS, "float32")
        surgery.control(f"{self.name}_schedule", schedule, (None,))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a steering layer at the site."""
        directions = self.directions
        hidden_dim = len(next(iter(directions.values())))
        if len(x.shape) != 3 or x.shape[-1] != hidden_dim:
            raise SurgeryError(
                f"Steer at '{place.path}': expected directions of the size that stands there, "
                f"{x.shape[2:]}. Received directions of size {hidden_dim}. Use a vector made for "
                "this model, and a site of hidden states."
            )
        blocks: list[int | None] = [*directions]
        index = blocks.index(place.block)
        layer = Steering(index, self.mode, self.renormalize, name=f"steer_{self.name}")
        inputs = [surgery.inputs[f"{self.name}_{part}"] for part in ("strength", "directions")]
        return layer(x, surgery.once("scale", lambda: self._scale(surgery)), *inputs)

    def _scale(self, surgery: Surgery) -> keras.KerasTensor:
        tokens, schedule = (surgery.inputs[f"{self.name}_{p}"] for p in ("tokens", "schedule"))
        scale = SteeringScale(name=f"scale_{self.name}")
        if self.when is None:
            return scale(surgery.positions, tokens, schedule)
        return scale(surgery.positions, tokens, schedule, surgery.signal(self.when))

    def _check_hint(self, surgery: Surgery) -> None:
        hint = getattr(self.vector, "model_hint", None)
        known = surgery.model.family.model_types
        if hint is not None and known and hint not in known:
            warnings.warn(
                f"{self._where}: the vector says that it was made for a model of type '{hint}'; "
                f"this one is of type {' or '.join(map(repr, known))}.",
                stacklevel=2,
            )

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength, a `Schedule`, or a `Control`. `None` is as the rewrite was made."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Control) else Control(strength=value)
        directions = self.directions
        blocks, hidden_dim = list(directions), len(next(iter(directions.values())))
        given = self.strength if control.strength is None else control.strength
        strength, schedule = strength_rows(given, rows.batch, len(blocks), where)
        tokens = self.tokens if control.tokens is None else control.tokens
        bound = {
            f"{self.name}_strength": strength,
            f"{self.name}_schedule": schedule,
            f"{self.name}_tokens": token_rows(tokens, rows.prompt_lengths, where),
        }
        if control.directions is not None:
            bound[f"{self.name}_directions"] = direction_rows(
                control.directions, rows.batch, blocks, hidden_dim, where
            )
        return bound


class SteeringScale(keras.layers.Layer):
    """Give the factor of the strength at each token: 0 where a row is not steered.

    Call arguments:
        positions: int32[batch, time].
        tokens: int32[batch, 3]: first position steered, the one after the last, and the number of
            prompt tokens.
        schedule: float32[batch, 1 + steps]: the factor over the prompt, then at each generated
            token; the last one holds.
        met: bool[batch, time], whether the condition of the row is met; always, if left out.

    Returns:
        float32[batch, time].
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, positions, tokens, schedule, met=None):
        """Look up the schedule, inside the range."""
        inside = ops.logical_and(positions >= tokens[:, :1], positions < tokens[:, 1:2])
        if met is not None:
            inside = ops.logical_and(inside, met)
        step = ops.clip(positions - tokens[:, 2:] + 1, 0, ops.shape(schedule)[1] - 1)
        return ops.where(inside, ops.take_along_axis(schedule, step, axis=1), 0.0)

    def compute_output_spec(self, positions, tokens, schedule, met=None):
        """One number for each token."""
        return keras.KerasTensor(positions.shape, "float32")


class Steering(keras.layers.Layer):
    """Steer one site. Holds no direction: all it needs are inputs.

    Args:
        index: which of the steered sites this is.
        mode: see `Steer`.
        renormalize: see `Steer`.

    Call arguments:
        x: float[batch, time, hidden_dim].
        scale: float32[batch, time], from `SteeringScale`.
        strength: float32[batch, sites].
        directions: float32[batch, sites, hidden_dim].
    """

    def __init__(self, index: int, mode: str, renormalize: bool, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.index, self.mode, self.renormalize = index, mode, renormalize

    def call(self, x, scale, strength, directions):
        """Steer the tokens in range; leave the others, and strength 0, exactly as they are."""
        strength = (scale * strength[:, self.index, None])[..., None]
        direction = directions[:, self.index, None, :]
        h = ops.cast(x, "float32")
        if self.mode == "add":
            steered = h + strength * direction
        else:
            unit = direction / ops.maximum(_norm(direction), 1e-12)
            steered = h - strength * unit * ops.sum(h * unit, axis=-1, keepdims=True)
        if self.renormalize:
            steered = steered * _norm(h) / ops.maximum(_norm(steered), 1e-12)
        return ops.where(ops.not_equal(strength, 0), ops.cast(steered, x.dtype), x)

    def compute_output_spec(self, x, scale, strength, directions):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)


def _norm(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
