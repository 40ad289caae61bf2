"""Weightless layers for what KerasHub's decoder blocks compute between their sub-layers."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops


class GatedProduct(layers.Layer):
    """Multiply a projection by the activation of another one, the gate.

    Args:
        activation: a function; if it adds up over all features, `activation.sums` is how often.
        upcast: whether the activation is computed in float32.

    Call arguments:
        gate: float[batch, time, ...].
        x: of the shape of the gate.
    """

    def __init__(self, activation: Callable[[Any], Any], upcast: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.activation, self.upcast = activation, upcast

    def call(self, gate, x):
        gate = ops.cast(gate, "float32") if self.upcast else gate
        return ops.cast(self.activation(gate), self.compute_dtype) * x

    def compute_output_spec(self, gate, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class PartialRotary(layers.Layer):
    """Rotate the first features of each head, or of each part of it, by position.

    Args:
        rotary: the block's own `keras_hub.layers.RotaryEmbedding`.
        features: how many features of a head are rotated; the others are left.
        parts: how many parts of equal size a head has, of which the first features are rotated.

    Call arguments:
        x: float[batch, time, heads, head_dim].
        positions: int32[batch, time].
    """

    def __init__(self, rotary: layers.Layer, features: int, parts: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rotary, self.features, self.parts = rotary, features, parts

    def call(self, x, positions):
        *heads, size = ops.shape(x)
        x = ops.reshape(x, (*heads, self.parts, size // self.parts))
        first, others = ops.split(x, [self.features // self.parts], axis=-1)
        rotated = self.rotary(ops.reshape(first, (*heads, self.features)), positions=positions)
        rotated = ops.reshape(rotated, ops.shape(first))
        return ops.reshape(ops.concatenate([rotated, others], axis=-1), (*heads, size))

    def compute_output_spec(self, x, positions):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class SplitHeads(layers.Layer):
    """Split what a projection gives into heads.

    Args:
        head_dim: size of one head.

    Call arguments:
        x: float[batch, time, heads * head_dim].
    """

    def __init__(self, head_dim: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.head_dim = head_dim

    def call(self, x):
        return ops.reshape(x, (*ops.shape(x)[:-1], -1, self.head_dim))

    def compute_output_spec(self, x):
        heads = x.shape[-1] // self.head_dim
        return keras.KerasTensor((*x.shape[:-1], heads, self.head_dim), self.compute_dtype)


class JoinHeads(layers.Layer):
    """Put heads side by side: float[batch, time, heads, head_dim] to [batch, time, features]."""

    def call(self, x):
        batch, time, heads, head_dim = ops.shape(x)
        return ops.reshape(x, (batch, time, heads * head_dim))

    def compute_output_spec(self, x):
        batch, time, heads, head_dim = x.shape
        return keras.KerasTensor((batch, time, heads * head_dim), self.compute_dtype)


class Split(layers.Layer):
    """Split features that one projection gives for several purposes.

    Args:
        places: where, as for `keras.ops.split`.

    Call arguments:
        x: float[batch, time, ..., features].
    """

    def __init__(self, *places: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.places = places

    def call(self, x):
        return ops.split(x, self.places, axis=-1)

    def compute_output_spec(self, x):
        ends = zip((0, *self.places), (*self.places, x.shape[-1]), strict=True)
        return [
            keras.KerasTensor((*x.shape[:-1], stop - start), self.compute_dtype)
            for start, stop in ends
        ]


class Renamed(layers.Layer):
    """Run a layer under another name, where a block has two of one name.

    Args:
        layer: the layer, which takes one tensor and keeps its shape.
    """

    def __init__(self, layer: layers.Layer, name: str) -> None:
        super().__init__(dtype=layer.dtype_policy, name=name)
        self.layer = layer

    def call(self, x, training=None):
        return self.layer(x, training=training)

    def compute_output_spec(self, x, training=None):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class Scaled(layers.Layer):
    """Multiply by a weight that the block itself owns.

    Args:
        scale: the variable.
        factor: a number to multiply by before.

    Call arguments:
        x: float[batch, time, hidden_dim].
    """

    def __init__(self, scale: keras.Variable, factor: float = 1.0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale, self.factor = scale, factor

    def call(self, x):
        return x * ops.cast(self.factor, x.dtype) * ops.cast(self.scale, x.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class Times(layers.Layer):
    """Multiply by a number.

    Args:
        factor: it.

    Call arguments:
        x: float[batch, time, ...].
    """

    def __init__(self, factor: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * ops.cast(self.factor, x.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class KnownTokens(layers.Layer):
    """Put token 0 in the place of those that a table has not: int[batch, time].

    Args:
        count: how many the table has.
    """

    def __init__(self, count: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.count = count

    def call(self, ids):
        is_known = ops.logical_and(ids >= 0, ids < self.count)
        return ops.where(is_known, ids, ops.zeros_like(ids))

    def compute_output_spec(self, ids):
        return keras.KerasTensor(ids.shape, ids.dtype)
