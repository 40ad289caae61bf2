"""The layers of `Steer`: what adds directions, and when; and directions that are learned."""

import keras
from keras import ops

from backbone_surgery.rewriting.site_layer import SiteLayer


@keras.saving.register_keras_serializable("backbone_surgery")
class SteeringDirections(keras.layers.Layer):
    """Directions as weights: what a trainable `Steer` learns.

    Args:
        blocks: the steered blocks, in order.
        hidden_dim: size of a direction.
        max_norm: how long a direction may become; not limited by default.

    Call arguments:
        strength: float32[batch, sites], for the number of rows.

    Returns:
        float32[batch, sites, hidden_dim], the same for every row.
    """

    def __init__(
        self, blocks: list[int], hidden_dim: int, max_norm: float | None = None, **kwargs
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self.blocks, self.hidden_dim, self.max_norm = list(blocks), hidden_dim, max_norm

    def build(self, strength_shape):
        """Create the directions, zero at first."""
        shape = (len(self.blocks), self.hidden_dim)
        limit = None if self.max_norm is None else keras.constraints.MaxNorm(self.max_norm, axis=1)
        self.directions = self.add_weight(
            shape=shape, initializer="zeros", dtype="float32", constraint=limit, name="directions"
        )

    def call(self, strength):
        """Repeat the directions for each row."""
        shape = (ops.shape(strength)[0], *self.directions.shape)
        return ops.broadcast_to(self.directions, shape)

    def compute_output_spec(self, strength):
        """Directions for each row."""
        return keras.KerasTensor((strength.shape[0], *self.directions.shape), "float32")

    def get_config(self):
        """Return the blocks and the size."""
        own = {"blocks": self.blocks, "hidden_dim": self.hidden_dim, "max_norm": self.max_norm}
        return {**super().get_config(), **own}


class SteeringScale(keras.layers.Layer):
    """Give the factor of the strength at each token: 0 where a row is not steered.

    Args:
        is_negated: whether a row is steered where its condition is not met.

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

    def __init__(self, is_negated: bool = False, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.is_negated = is_negated

    def call(self, positions, tokens, schedule, met=None):
        """Look up the schedule, in the range."""
        steered = in_range(positions, tokens)
        if met is not None:
            steered = ops.logical_and(steered, ops.logical_xor(met, self.is_negated))
        step = ops.clip(positions - tokens[:, 2:] + 1, 0, ops.shape(schedule)[1] - 1)
        return ops.where(steered, ops.take_along_axis(schedule, step, axis=1), 0.0)

    def compute_output_spec(self, positions, tokens, schedule, met=None):
        """One number for each token."""
        return keras.KerasTensor(positions.shape, "float32")


class Steering(SiteLayer):
    """Steer one site by directions that are inputs of the graph.

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
        super().__init__(**kwargs)
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


def in_range(positions, tokens):
    """Tell which tokens are in the range of their row, bool[batch, time].

    Args:
        positions: int32[batch, time].
        tokens: int32[batch, 3], as of `SteeringScale`.
    """
    return ops.logical_and(positions >= tokens[:, :1], positions < tokens[:, 1:2])


def _norm(x):
    """Return the norms of vectors, whose gradient is 0 where the norm is."""
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    is_zero = ops.equal(squares, 0)
    return ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, squares)))
