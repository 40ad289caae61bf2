"""Steer: add a direction to the hidden states, or take it out, by a strength set at run time."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import keras
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.site import Place
from backbone_surgery.rewriting.control import (
    SCHEDULE_STEPS,
    Control,
    Tokens,
    check_trained_tokens,
    default_tokens,
    range_before,
    read_tokens,
    strength_rows,
    token_rows,
)
from backbone_surgery.rewriting.directions import direction_rows, read_directions
from backbone_surgery.rewriting.fields import Fields
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery
from backbone_surgery.rewriting.steering import Steering, SteeringDirections, SteeringScale


@keras.saving.register_keras_serializable("backbone_surgery")
@dataclass(frozen=True, eq=False)
class Steer(ControlledRewrite):
    """Add a control vector at some sites.

    The strength of each row and steered block, the directions themselves, the range of tokens and
    the schedule over generated tokens are inputs of the graph: changing them compiles nothing. A
    strength of 0 is bit-equal to no edit. Several `Steer` add up.

    Attributes:
        name: name of the control, for `generate(controls={name: strength})`.
        vector: a `ControlVector`, or `{block: float[hidden_dim]}`. A direction for a block that is
            not among the sites of `at` is an error.
        at: site selector; the sites with a direction are steered.
        tokens: which tokens: `"all"`, `"prompt"`, `"generated"`, `"last"`, which is the last token
            of the prompt, or positions `(start, stop)`. These count from the first token of the
            row, and negative ones from the end of the prompt: `(-1, None)` are its last token and
            all that follow. In one pass over a text, as in an analysis and in `score` without
            `prompt_lengths`, all tokens count as the prompt. `fit` and a call of the model do not
            know where a row ends: what counts from there is refused.
        mode: `"add"` gives h + s·v, `"ablate"` gives h - s·v̂(v̂·h) with v̂ of unit norm.
        renormalize: whether to scale the result back to the norm of h, computed in float32.
        strength: the default of the control, one number.
        when: name of a `Condition` before it in the list. A row is steered from the token at which
            its condition is met.
        unless: name of a `Condition`, in place of `when`. A row is steered up to the token before
            the one at which its condition is met. To decide by the prompt, steer generated tokens.
        trainable: whether the directions are learned. To steer generated tokens alone, train with
            `tokens="all"`, and pass `Control(tokens="generated")` to `generate`.
        max_norm: how long a learned direction may become; not limited by default.
        learned: the layer that holds learned directions, to continue with instead of starting at
            `vector`.

    Raises:
        SurgeryError: a field that no model could use. What does not fit a model, `operate` tells.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Steer("mood", {1: np.zeros(8)}, trainable=True)])
        >>> [v.shape for v in edited.trainable_variables], edited.rewrites[0].directions[1].shape
        ([(1, 8)], (8,))
    """

    name: str
    vector: Any
    at: str = "blocks.*"
    tokens: Tokens = "all"
    mode: Literal["add", "ablate"] = "add"
    renormalize: bool = False
    strength: float = 1.0
    when: str | None = None
    trainable: bool = False
    max_norm: float | None = None
    learned: SteeringDirections | None = None
    unless: str | None = None

    def __post_init__(self) -> None:
        fields = Fields(self, "name")
        fields.name()
        fields.selector()
        fields.choice("mode", ("add", "ablate"))
        fields.flag("renormalize")
        fields.flag("trainable")
        advice = "A Schedule, or one for each row, goes into `generate(controls=...)`."
        fields.number("strength", advice=advice)
        fields.number("max_norm", optional=True)
        fields.name("when", optional=True)
        fields.name("unless", optional=True)
        if self.when is not None and self.unless is not None:
            raise fields.refuse(
                "a condition by `when` or by `unless`",
                (self.when, self.unless),
                "Leave one out. Two `Steer` may have a condition each.",
            )
        described = "`learned` to be the layer of a trainable Steer"
        fields.instance("learned", SteeringDirections, described, optional=True)
        fields.keep("tokens", read_tokens(self.tokens, fields.where))
        directions = read_directions(self.vector, fields.where)
        if not hasattr(self.vector, "directions"):
            fields.keep("vector", directions)
        self._check_trainable(directions)

    @property
    def _where(self) -> str:
        return f"Steer at '{self.name}'"

    @property
    def condition(self) -> str | None:
        """Name of the condition that decides which rows are steered, if there is one."""
        return self.unless if self.when is None else self.when

    @property
    def directions(self) -> dict[int, np.ndarray]:
        """The direction of each steered block as it is now, in the order of the blocks."""
        if self.learned is not None and self.learned.built:
            rows = hosts.to_numpy(self.learned.directions)
            return dict(zip(self.learned.blocks, rows.copy(), strict=True))
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
        surgery.control(f"{self.name}_strength", np.full(len(directions), self.strength, "float32"))
        if not self.trainable:
            surgery.control(f"{self.name}_directions", directions)
        surgery.control(f"{self.name}_tokens", default_tokens(self.tokens))
        schedule = np.ones(1 + SCHEDULE_STEPS, "float32")
        surgery.control(f"{self.name}_schedule", schedule, (None,))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a steering layer at the site."""
        directions = surgery.once("vector", lambda: self.directions)
        hidden_dim = len(next(iter(directions.values())))
        if len(x.shape) != 3 or x.shape[-1] != hidden_dim:
            use = "Use a vector made for this model"
            use = use if len(x.shape) == 3 else "Put a layer of your own there by `Insert`"
            raise SurgeryError(
                f"Steer at '{place.path}': expected directions of the size that stands there, "
                f"{x.shape[2:]}. Received directions of size {hidden_dim}. {use}. "
                f"{surgery.sites_of((hidden_dim,), place)}"
            )
        blocks: list[int | None] = [*directions]
        index = blocks.index(place.block)
        layer = Steering(index, self.mode, self.renormalize, name=f"steer_{self.name}")
        strength = surgery.inputs[f"{self.name}_strength"]
        scale = surgery.once("scale", lambda: self._scale(surgery))
        if not self.trainable:
            return layer(x, scale, strength, surgery.inputs[f"{self.name}_directions"])
        learned = surgery.once("directions", lambda: self._learned(surgery)(strength))
        return layer(x, scale, strength, learned)

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what acts on generated tokens alone, or on tokens from `end` on."""
        parts = ("strength", "directions", "tokens", "schedule")
        names = {p: n for p in parts if (n := f"{self.name}_{p}") in bound}
        own = {part: bound[name] for part, name in names.items()}
        # Over the prompt the first entry of the schedule holds, whatever the prompt's length.
        tokens = range_before(own["tokens"], end)
        acts = {
            "tokens": tokens,
            "strength": own["strength"] * own["schedule"][:, :1],
            "schedule": np.zeros(0),
        }
        if tokens is None or not acts["strength"].any():
            acts = {part: np.zeros(0) for part in own}
        return {names[part]: array for part, array in acts.items()}

    def _learned(self, surgery: Surgery) -> SteeringDirections:
        """Return the layer that holds the directions, and declare it to be trained."""
        start = np.stack(list(self.directions.values()))
        name = f"learned_{self.name}"
        layer = self.learned or SteeringDirections(
            [*self.directions], start.shape[1], self.max_norm, name=name
        )
        if not layer.built:
            layer.build(None)
            limit = layer.directions.constraint
            layer.directions.assign(start if limit is None else limit(start))
        surgery.train(layer)
        return layer

    def applied(self, surgery: Surgery) -> "Steer":
        """Return the rewrite with the layer of its directions."""
        return replace(self, learned=surgery.trained[0]) if self.trainable else self

    def _check_trainable(self, directions: Mapping[int, np.ndarray]) -> None:
        where = f"{self._where} with trainable={self.trainable}"
        if self.learned is not None and (
            not self.trainable or self.learned.blocks != list(directions)
        ):
            raise SurgeryError(
                f"{where}: expected `learned` of a trainable Steer of blocks {list(directions)}. "
                f"Received one of blocks {self.learned.blocks}. Leave `learned` out to start anew."
            )
        if self.learned is not None and self.learned.max_norm != self.max_norm:
            raise SurgeryError(
                f"{where}: expected the `max_norm` of `learned`, {self.learned.max_norm}. Received "
                f"{self.max_norm!r}. Leave `learned` out to start anew."
            )
        if self.max_norm is not None and (not self.trainable or self.max_norm <= 0):
            raise SurgeryError(
                f"{where}: expected `max_norm` above 0, of a trainable Steer. Received "
                f"{self.max_norm!r}. Leave it out, or pass how long a direction may become."
            )
        flat = [block for block, direction in directions.items() if not direction.any()]
        if self.trainable and (self.strength == 0 or (self.mode == "ablate" and flat)):
            received = "strength 0" if self.strength == 0 else f"zeros at blocks {flat}"
            raise SurgeryError(
                f"{where}: expected a start that has a gradient: a strength other than 0, and in "
                f"mode 'ablate' directions other than zero. Received {received}. Start elsewhere."
            )
        if self.trainable and self.learned is None:
            check_trained_tokens(self.tokens, where)

    def check_fit(self) -> None:
        """Refuse to train what acts on generated tokens alone."""
        if self.learned is not None and self.learned.trainable:
            check_trained_tokens(self.tokens, self._where)

    def _scale(self, surgery: Surgery) -> keras.KerasTensor:
        tokens, schedule = (surgery.inputs[f"{self.name}_{p}"] for p in ("tokens", "schedule"))
        scale = SteeringScale(self.unless is not None, name=f"scale_{self.name}")
        if self.condition is None:
            return scale(surgery.positions, tokens, schedule)
        return scale(surgery.positions, tokens, schedule, surgery.signal(self.condition))

    def _check_hint(self, surgery: Surgery) -> None:
        hint = getattr(self.vector, "model_hint", None)
        known = surgery.model.family.model_types
        if isinstance(hint, str) and known and hint not in known:
            warnings.warn(
                f"{self._where}: the vector says that it was made for a model of type '{hint}'; "
                f"this one is of type {' or '.join(map(repr, known))}.",
                stacklevel=2,
            )

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength, a `Schedule`, or a `Control`. `None` takes the fields of the rewrite."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Control) else Control()
        control.check_only(("strength", "directions", "tokens"), where, "Steer")
        strength = control.strength if isinstance(value, Control) else value
        strength = self.strength if strength is None else strength
        tokens = self.tokens if control.tokens is None else control.tokens
        directions = self.directions
        strengths, schedules = strength_rows(strength, rows.batch, len(directions), where)
        bound = {
            f"{self.name}_strength": strengths,
            f"{self.name}_schedule": schedules,
            f"{self.name}_tokens": token_rows(tokens, rows.prompt_lengths, where),
        }
        if control.directions is not None:
            if self.trainable:
                raise SurgeryError(
                    f"{where}: expected no directions for a Steer that learns its own. Received "
                    "some. Use a Steer without `trainable`."
                )
            hidden_dim = len(next(iter(directions.values())))
            bound[f"{self.name}_directions"] = direction_rows(
                control.directions, rows.batch, [*directions], hidden_dim, where
            )
        return bound
