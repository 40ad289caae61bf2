"""Steer: add a direction to the hidden states, or take it out, by a strength given at run time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.site import Place

_LAST = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Steer(SiteRewrite):
    """Steer the hidden states along a direction for each block.

    The strength of each row and block, the directions themselves and the range of tokens are
    inputs of the graph: changing them compiles nothing. A strength of 0 is bit-equal to no edit.

    Attributes:
        name: name of the control, for `generate(controls={name: strength})`.
        vector: `{block: float[hidden_dim]}`, or anything with such a `directions`. A direction
            for a block that is not among the sites of `at` is an error.
        at: site selector; the sites with a direction are steered.
        tokens: which tokens: `"all"`, `"prompt"`, `"generated"`, or positions `(start, stop)`
            counted from the first token of the row.
        mode: `"add"` gives h + s·v, `"ablate"` gives h - s·v̂(v̂·h) with v̂ of unit norm.
        renormalize: whether to scale the result back to the norm of h, computed in float32.
        strength: where the control is not given.
    """

    name: str
    vector: Any
    at: str = "blocks.*"
    tokens: str | tuple[int, int] = "all"
    mode: Literal["add", "ablate"] = "add"
    renormalize: bool = False
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("add", "ablate"):
            raise SurgeryError(
                f"Steer at '{self.name}': expected mode 'add' or 'ablate'. Received {self.mode!r}. "
                "Choose one of them."
            )
        self.token_range(np.zeros(1, np.int32))
        directions = {int(k): np.array(v, "float32") for k, v in _directions(self.vector).items()}
        shapes = {v.shape for v in directions.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise SurgeryError(
                f"Steer at '{self.name}': expected a vector that maps blocks to directions "
                f"float[hidden_dim], all of one size. Received shapes {sorted(shapes)}. Pass "
                "{block: array}."
            )
        object.__setattr__(self, "vector", directions)

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    def token_range(self, prompt_lengths: np.ndarray) -> np.ndarray:
        """Return the positions to steer, int32[batch, 2]: from one, up to but without the other."""
        lengths = np.asarray(prompt_lengths, np.int32)
        if self.tokens == "all":
            pair: tuple[Any, Any] = (0, _LAST)
        elif self.tokens == "prompt":
            pair = (0, lengths)
        elif self.tokens == "generated":
            pair = (lengths, _LAST)
        elif isinstance(self.tokens, tuple) and len(self.tokens) == 2:
            pair = self.tokens
        else:
            raise SurgeryError(
                f"Steer at '{self.name}': expected tokens 'all', 'prompt', 'generated' or "
                f"(start, stop). Received {self.tokens!r}. Choose one of them."
            )
        return np.stack([np.broadcast_to(np.int32(x), lengths.shape) for x in pair], axis=-1)

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the selected sites that have a direction."""
        selected = surgery.select(self.at)
        missing = set(self.vector) - {p.block for p in selected}
        if missing:
            raise SurgeryError(
                f"Steer at '{self.at}': expected a direction only for blocks among the selected "
                f"sites {[p.path for p in selected]}. Received directions for blocks "
                f"{sorted(missing)} too. Drop them, or select more sites."
            )
        chosen = [p for p in selected if p.block in self.vector]
        blocks = [p.block for p in chosen]
        if len(set(blocks)) < len(blocks):
            raise SurgeryError(
                f"Steer at '{self.at}': expected one site in each block. Received "
                f"{[p.path for p in chosen]}. Use one Steer for each kind of site."
            )
        return chosen

    def visitor(self, surgery: Surgery) -> Any:
        """Declare the controls, then visit the sites."""
        places = self.choose(surgery)
        directions = np.stack([self.vector[p.block] for p in places])
        strength = np.full(len(places), self.strength, "float32")
        if self.tokens in ("prompt", "generated"):
            default_range = np.array([0, _LAST] if self.tokens == "prompt" else [_LAST, _LAST])
        else:
            default_range = self.token_range(np.zeros(1))[0]
        surgery.control(f"{self.name}_strength", strength)
        surgery.control(f"{self.name}_directions", directions)
        surgery.control(f"{self.name}_tokens", default_range.astype("int32"))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Put a steering layer at the site."""
        hidden_dim = len(next(iter(self.vector.values())))
        if len(x.shape) != 3 or x.shape[-1] != hidden_dim:
            raise SurgeryError(
                f"Steer at '{place.path}': expected directions of the size that stands there, "
                f"{x.shape[2:]}. Received directions of size {hidden_dim}. Use a vector made for "
                "this model, and a site of hidden states."
            )
        index = len(surgery.fired) - 1
        layer = Steering(index, self.mode, self.renormalize, name=f"steer_{self.name}")
        controls = [surgery.inputs[f"{self.name}_{part}"] for part in _PARTS]
        return layer(x, surgery.positions, *controls)

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength: a number, one for each row, or one for each row and steered site.

        `None` stands for the strength that the rewrite was made with.
        """
        sites = len(self.vector)
        value = self.strength if value is None else value
        strength = np.asarray(value, "float32")
        if strength.ndim == 1:
            strength = strength[:, None]
        allowed = strength.ndim in (0, 2) and all(
            size in (1, wanted)
            for size, wanted in zip(strength.shape, (rows.batch, sites), strict=False)
        )
        if not allowed or not np.isfinite(strength).all():
            raise SurgeryError(
                f"controls at '{self.name}': expected a finite strength, a number, "
                f"[{rows.batch}] (one for each row) or [{rows.batch}, {sites}] (for each row and "
                f"steered block). Received {value!r}. Pass one of these."
            )
        return {
            f"{self.name}_strength": np.broadcast_to(strength, (rows.batch, sites)),
            f"{self.name}_tokens": self.token_range(rows.prompt_lengths),
        }


_PARTS = ("strength", "directions", "tokens")


def _directions(vector: Any) -> Mapping[int, Any]:
    directions = getattr(vector, "directions", vector)
    if not isinstance(directions, Mapping) or not directions:
        raise SurgeryError(
            f"Steer: expected a vector that maps blocks to directions. Received {vector!r}. Pass "
            "{block: array}."
        )
    return directions


class Steering(keras.layers.Layer):
    """Steer one site. Holds no direction: all it needs are inputs.

    Args:
        index: which of the steered sites this is.
        mode: see `Steer`.
        renormalize: see `Steer`.

    Call arguments:
        x: float[batch, time, hidden_dim].
        positions: int32[batch, time].
        strength: float32[batch, sites].
        directions: float32[batch, sites, hidden_dim].
        tokens: int32[batch, 2].
    """

    def __init__(self, index: int, mode: str, renormalize: bool, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.index, self.mode, self.renormalize = index, mode, renormalize

    def call(self, x, positions, strength, directions, tokens):
        """Steer the tokens in range; leave the others, and strength 0, exactly as they are."""
        strength = strength[:, self.index, None, None]
        direction = directions[:, self.index, None, :]
        h = ops.cast(x, "float32")
        if self.mode == "add":
            steered = h + strength * direction
        else:
            unit = direction / ops.maximum(_norm(direction), 1e-12)
            steered = h - strength * unit * ops.sum(h * unit, axis=-1, keepdims=True)
        if self.renormalize:
            steered = steered * _norm(h) / ops.maximum(_norm(steered), 1e-12)
        inside = ops.logical_and(positions >= tokens[:, :1], positions < tokens[:, 1:])
        changed = ops.logical_and(inside[..., None], ops.not_equal(strength, 0))
        return ops.where(changed, ops.cast(steered, x.dtype), x)

    def compute_output_spec(self, x, positions, strength, directions, tokens):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)


def _norm(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
