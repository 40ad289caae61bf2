"""RangedRewrite: what acts on a range of tokens, by a strength for each row."""

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

from backbone_surgery.rewriting.amounts import bind_amounts
from backbone_surgery.rewriting.control import (
    Control,
    Tokens,
    default_tokens,
    range_before,
    token_rows,
)
from backbone_surgery.rewriting.rewrite import ControlledRewrite, Rows, Surgery


class RangedRewrite(ControlledRewrite):
    """A rewrite whose control is a strength, or a `Control` of strength and tokens.

    Attributes:
        strength: the default of the control.
        tokens: which tokens it acts on, as of `Steer`.
    """

    strength: float
    tokens: Tokens
    parts: ClassVar[tuple[str, ...]] = ("strength", "tokens")
    """Fields of a `Control` that a call may set."""

    def declare(self, surgery: Surgery) -> None:
        """Declare strength and tokens as inputs of the graph."""
        surgery.control(f"{self.name}_strength", np.float32(self.strength))
        surgery.control(f"{self.name}_tokens", default_tokens(self.tokens))

    def declared(self, surgery: Surgery) -> list[keras.KerasTensor]:
        """Return the inputs of strength, float32[batch], and tokens, int32[batch, 3]."""
        return [surgery.inputs[f"{self.name}_{part}"] for part in ("strength", "tokens")]

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Leave out what acts on generated tokens alone, or on tokens from `end` on."""
        tokens = range_before(bound[f"{self.name}_tokens"], end)
        if tokens is None or not bound[f"{self.name}_strength"].any():
            return {f"{self.name}_{part}": np.zeros(0) for part in ("strength", "tokens")}
        return {f"{self.name}_tokens": tokens}

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a strength, or a `Control`. `None` takes the fields of the rewrite."""
        where = f"controls at '{self.name}'"
        control = value if isinstance(value, Control) else Control()
        control.check_only(self.parts, where, type(self).__name__)
        strength = control.strength if isinstance(value, Control) else value
        strength = self.strength if strength is None else strength
        tokens = self.tokens if control.tokens is None else control.tokens
        return {
            f"{self.name}_strength": bind_amounts(strength, where, rows.batch),
            f"{self.name}_tokens": token_rows(tokens, rows.prompt_lengths, where),
        }
