"""Condition: watch the hidden states for a direction, and let it decide which rows are steered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.emission import emit
from backbone_surgery.errors import SurgeryError
from backbone_surgery.rewrites.control import LAST, Tokens, read_directions, token_range, token_rows
from backbone_surgery.rewrites.rewrite import Rows, SiteRewrite, Surgery
from backbone_surgery.site import Place


@dataclass(frozen=True)
class Condition(SiteRewrite):
    """Decide for each row, while it runs, whether a `Steer(when=name)` applies to it.

    At each token the cosine between the hidden state and its projection on the condition vector,
    |cos(h, v)|, is compared with the threshold. Once it is above, the condition stays met for the
    rest of the row. Blocks after the one that is watched can be steered by it. Threshold and
    direction are inputs of the graph: changing them compiles nothing.

    Source: conditional activation steering (CAST), Lee et al. 2024, arXiv:2409.05907.

    Attributes:
        name: name of the condition, for `Steer(when=name)`, and of its control: a threshold, for
            all rows or one for each.
        vector: float[hidden_dim], or a control vector with a direction for the block watched.
        threshold: what the cosine has to exceed, from -1 to 1.
        at: site selector of the one site that is watched.
        tokens: which tokens are looked at, as of `Steer`.
        signed: whether to compare cos(h, v) instead of its absolute value, for vectors that point
            one way for rows that meet the condition and the other way for the rest.
    """

    name: str
    vector: Any
    threshold: float
    at: str
    tokens: Tokens = "all"
    signed: bool = False

    def __post_init__(self) -> None:
        token_range(self.tokens, 1, self._where)
        self._thresholds(self.threshold, 1)
        if hasattr(self.vector, "directions"):
            return
        if isinstance(self.vector, Mapping):
            object.__setattr__(self, "vector", read_directions(self.vector, self._where))
        else:
            directions = read_directions({0: self.vector}, self._where)
            object.__setattr__(self, "vector", directions[0])

    @property
    def _where(self) -> str:
        return f"Condition at '{self.name}'"

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

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
        default_range = token_range(self.tokens, LAST, self._where)
        surgery.control(f"{self.name}_direction", direction)
        surgery.control(f"{self.name}_threshold", np.float32(self.threshold))
        surgery.control(f"{self.name}_tokens", np.array([*default_range, LAST], "int32"))
        return super().visitor(surgery)

    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Watch the site, and hand out whether the condition is met."""
        direction = surgery.inputs[f"{self.name}_direction"]
        if x.shape[2:] != direction.shape[1:]:
            raise SurgeryError(
                f"{self._where}: expected a vector of the size that stands at '{place.path}', "
                f"{x.shape[2:]}. Received one of size {direction.shape[1:]}. Use a vector made for "
                f"this model. {surgery.sites_of(tuple(direction.shape[1:]), place)}"
            )
        parts = [surgery.inputs[f"{self.name}_{part}"] for part in ("threshold", "tokens")]
        watch = Watch(self.signed, name=f"watch_{self.name}")
        found = watch(x, surgery.positions, surgery.padding_mask, direction, *parts)
        emit(self.name, Latch(name=f"condition_{self.name}")(found))
        return x

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
        return directions[place.block]

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Bind a threshold, for all rows or one for each. `None` is as the rewrite was made."""
        threshold = self.threshold if value is None else value
        return {
            f"{self.name}_threshold": self._thresholds(threshold, rows.batch),
            f"{self.name}_tokens": token_rows(self.tokens, rows.prompt_lengths, self._where),
        }

    def _thresholds(self, value: Any, batch: int) -> np.ndarray:
        try:
            threshold = np.asarray(value, "float32")
        except (TypeError, ValueError):
            threshold = np.array(np.nan)
        if threshold.shape not in ((), (batch,)) or not (np.abs(threshold) <= 1).all():
            raise SurgeryError(
                f"{self._where}: expected a threshold from -1 to 1, a number or [{batch}]. "
                f"Received {value!r}. Pass a cosine."
            )
        return np.broadcast_to(threshold, (batch,))


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
        inside = ops.logical_and(positions >= tokens[:, :1], positions < tokens[:, 1:2])
        inside = ops.logical_and(inside, ops.cast(padding_mask, "bool"))
        return ops.logical_and(inside, cosine > threshold[:, None])

    def compute_output_spec(self, x, *others):
        """One flag for each token."""
        return keras.KerasTensor(x.shape[:2], "bool")


class Latch(keras.layers.Layer):
    """Tell for each token whether it or one before it in its row was found.

    Call arguments:
        found: bool[batch, time].
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, found):
        """Accumulate along the row."""
        return _so_far(found)

    def compute_output_spec(self, found):
        """One flag for each token."""
        return keras.KerasTensor(found.shape, "bool")


class CachedLatch(keras.layers.Layer):
    """`Latch` over a cache of what was found so far.

    Call arguments:
        found: bool[batch, time], of the tokens being run.
        cache: bool[batch, length].
        cache_update_index: int32[], the slot of the first of them.

    Returns:
        bool[batch, time], and the updated cache.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, found, cache, cache_update_index):
        """Accumulate along the row, from what the slots before hold."""
        slots = ops.arange(ops.shape(cache)[1], dtype="int32")
        before = ops.logical_and(cache, (slots < cache_update_index)[None])
        met = ops.logical_or(_so_far(found), ops.any(before, axis=1, keepdims=True))
        index = ops.cast(cache_update_index, "int32")
        return met, ops.slice_update(cache, (0, index), found)

    def compute_output_spec(self, found, cache, cache_update_index):
        """One flag for each token, and the cache as it was."""
        met = keras.KerasTensor(found.shape, "bool")
        return met, keras.KerasTensor(cache.shape, "bool")


def _so_far(found):
    return ops.cumsum(ops.cast(found, "int32"), axis=1) > 0
