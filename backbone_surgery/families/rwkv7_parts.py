"""Layers of what RWKV-7 computes between its sub-layers, over weights that the block owns."""

import keras
from keras import layers, ops


class Masked(layers.Layer):
    """Put zeros where a token is padding, as KerasHub does.

    Call arguments:
        x: float[batch, time, channels].
        padding_mask: int or bool[batch, time].
    """

    def call(self, x, padding_mask):
        return x * ops.cast(padding_mask, x.dtype)[..., None]

    def compute_output_spec(self, x, padding_mask):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class TokenMix(layers.Layer):
    """Go from a token to the one before it, by a share for each channel.

    Args:
        share: a weight that the block itself owns, float[channels].

    Call arguments:
        x: float[batch, time, channels].
        previous: what stands at the token before, of the shape of x.
    """

    def __init__(self, share: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.share = share

    def call(self, x, previous):
        return x + (previous - x) * self.share

    def compute_output_spec(self, x, previous):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class LowRankMap(layers.Layer):
    """Multiply by two narrow matrices, with an activation between them.

    Args:
        down: a weight that the block itself owns, float[channels, rank].
        up: likewise, float[rank, channels].
        bias: likewise, float[channels]; `None` is none.
        activation: between the two; `None` is none.

    Call arguments:
        x: float[batch, time, channels].
    """

    def __init__(
        self,
        down: keras.Variable,
        up: keras.Variable,
        bias: keras.Variable | None = None,
        activation: str | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.down, self.up, self.bias = down, up, bias
        self.activation = keras.activations.get(activation)

    def call(self, x):
        x = ops.matmul(self.activation(ops.matmul(x, self.down)), self.up)
        return x if self.bias is None else self.bias + x

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], self.up.shape[1]), self.compute_dtype)


class ChannelDecay(layers.Layer):
    """The share of a channel of its state that a token keeps, float32, of the shape of x.

    Call arguments:
        x: float[batch, time, heads, key_dim].
    """

    def call(self, x):
        return ops.exp(-ops.exp(-ops.softplus(-ops.cast(x, "float32")) - 0.5))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


class Interpolate(layers.Layer):
    """Go from x to y by a share of the way; all three are float[batch, time, channels]."""

    def call(self, x, y, share):
        return x + (y - x) * share

    def compute_output_spec(self, x, y, share):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class RemovedKey(layers.Layer):
    """The key of what a token takes out of the memory: its key, scaled, and of length one.

    Args:
        scale: a weight that the block itself owns, float[heads * key_dim].

    Call arguments:
        key: float[batch, time, heads, key_dim].
    """

    def __init__(self, scale: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, key):
        key = key * ops.reshape(self.scale, key.shape[2:])
        inverse = ops.rsqrt(ops.sum(ops.square(key), axis=-1, keepdims=True) + 1e-12)
        return key * inverse

    def compute_output_spec(self, key):
        return keras.KerasTensor(key.shape, self.compute_dtype)


class WrittenKey(layers.Layer):
    """The key that a token writes its value to: scaled by how strong it writes.

    Args:
        share: a weight that the block itself owns, float[heads * key_dim]: how much that counts.

    Call arguments:
        key: float[batch, time, heads, key_dim].
        strength: of the shape of the key.
    """

    def __init__(self, share: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.share = share

    def call(self, key, strength):
        return key * (1 + (strength - 1) * ops.reshape(self.share, key.shape[2:]))

    def compute_output_spec(self, key, strength):
        return keras.KerasTensor(key.shape, self.compute_dtype)


class HeadNorm(layers.Layer):
    """Normalize each head of each token by itself.

    Args:
        norm: the block's own `keras.layers.GroupNormalization` over channels, a group for a head.

    Call arguments:
        x: float[batch, time, heads, head_dim].
    """

    def __init__(self, norm: layers.GroupNormalization, **kwargs) -> None:
        super().__init__(**kwargs)
        self.norm = norm

    def call(self, x):
        batch, time, heads, size = ops.shape(x)
        return ops.reshape(self.norm(ops.reshape(x, (batch * time, heads * size))), ops.shape(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class Bonus(layers.Layer):
    """Add the value of a token itself to what it reads, as far as its query fits its key.

    Args:
        scale: of the products, a weight that the block itself owns, float[heads, key_dim].

    Call arguments:
        x: what is read, float[batch, time, heads, value_dim].
        query: float[batch, time, heads, key_dim].
        key: likewise.
        value: of the shape of x.
    """

    def __init__(self, scale: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, x, query, key, value):
        return x + ops.sum(query * key * self.scale, axis=-1, keepdims=True) * value

    def compute_output_spec(self, x, query, key, value):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class SquaredRelu(layers.Layer):
    """The square of what is positive."""

    def call(self, x):
        return ops.square(ops.relu(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)
