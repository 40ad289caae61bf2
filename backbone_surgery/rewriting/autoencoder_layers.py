"""The layers of a sparse autoencoder: weights that are not trained, computed in float32."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from backbone_surgery.rewriting.autoencoder_files import Autoencoder
from backbone_surgery.rewriting.site_layer import interpolate

_SMALLEST = 1e-12
"""What a norm is at least: a token of zeros is encoded as zeros."""

_EPSILON = 1e-5
"""What SAELens adds to a standard deviation, where it divides by it."""


def encoder_of(autoencoder: Autoencoder, name: str) -> "Encoder":
    """Return the encoder of an autoencoder."""
    size, latents = autoencoder.encoder.shape
    values = {"weight": autoencoder.encoder, "bias": autoencoder.bias, "center": autoencoder.center}
    if autoencoder.threshold is not None:
        values["threshold"] = autoencoder.threshold
    layer = Encoder(latents, size, autoencoder.k, autoencoder.normalize, name=name)
    return layer.filled(**values)


def decoder_of(autoencoder: Autoencoder, name: str, skip: np.ndarray | None = None) -> "Decoder":
    """Return the decoder of an autoencoder, or of a transcoder with a skip [source size, size]."""
    latents, size = autoencoder.decoder.shape
    values = {"weight": autoencoder.decoder, "bias": autoencoder.shift}
    if skip is not None:
        values["skip"] = skip
    source_size = None if skip is None else len(skip)
    layer = Decoder(latents, size, autoencoder.normalize, source_size, name=name)
    return layer.filled(**values)


class _Fixed(keras.layers.Layer):
    """A layer of weights that are not trained, computed in float32.

    Args:
        settings: the arguments by name, as `get_config` gives them back; `size` is that of a token.
        shapes: the shapes of its weights, by name.
    """

    def __init__(
        self, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]], **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, **{**kwargs, "dtype": "float32"})
        self.settings, self.shapes = settings, shapes

    def build(self, *inputs):
        """Create the weights, zero until they are filled."""
        for name, shape in self.shapes.items():
            weight = self.add_weight(name=name, shape=shape, initializer="zeros", trainable=False)
            setattr(self, name, weight)

    def filled(self, **values: np.ndarray) -> Any:
        """Fill the weights, and return the layer."""
        self.build(None)
        self.built = True
        for name, value in values.items():
            getattr(self, name).assign(value)
        return self

    def get_config(self):
        """Return the settings."""
        return {**super().get_config(), **self.settings}

    def flat(self, x):
        """Return tokens as float32[batch, time, size], heads side by side."""
        x = ops.cast(x, "float32")
        flat = (*ops.shape(x)[:2], self.settings["size"])
        return ops.reshape(x, flat) if len(x.shape) == 4 else x


def _normalizer(x, how: str):
    """Return what is subtracted from float32 tokens to normalise them, and the scale that is left.

    Args:
        x: float32[..., size].
        how: one of `NORMALIZED`.
    """
    if how == "constant_norm_rescale":
        norms = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
        return 0.0, ops.maximum(norms, _SMALLEST) / math.sqrt(x.shape[-1])
    if how == "layer_norm":
        mean = ops.mean(x, axis=-1, keepdims=True)
        squares = ops.sum(ops.square(x - mean), axis=-1, keepdims=True)
        return mean, ops.sqrt(squares / (x.shape[-1] - 1))
    return 0.0, 1.0


@keras.saving.register_keras_serializable("backbone_surgery")
class Encoder(_Fixed):
    """Encode float[batch, time, size] as features, float32[batch, time, latents].

    Args:
        latents: number of features.
        size: of a token.
        k: how many of the largest features are kept, or `None` for those over their threshold.
        normalize: what is done to tokens first, see `Autoencoder`.
    """

    def __init__(
        self, latents: int, size: int, k: int | None = None, normalize: str = "none", **kwargs: Any
    ) -> None:
        shapes = {"weight": (size, latents), "bias": (latents,), "center": (size,)}
        if k is None:
            shapes["threshold"] = (latents,)
        settings = {"latents": latents, "size": size, "k": k, "normalize": normalize}
        super().__init__(settings, shapes, **kwargs)

    def call(self, x):
        """Return the features, zero where they are not kept."""
        return self.keep(self.score(x))

    def score(self, x):
        """Return what the features are kept by: their values, before negative ones are zero."""
        x, how = self.flat(x), self.settings["normalize"]
        shift, scale = _normalizer(x, how)
        scale = scale + _EPSILON if how == "layer_norm" else scale
        return ops.matmul((x - shift) / scale - self.center, self.weight) + self.bias

    def keep(self, scores):
        """Return the features of some scores, zero where they are not kept."""
        features = ops.relu(scores)
        if self.settings["k"] is None:
            return ops.where(scores > self.threshold, features, 0.0)
        return largest(features, self.settings["k"])

    def compute_output_spec(self, x):
        """Return the shape of the features."""
        return keras.KerasTensor((*x.shape[:2], self.settings["latents"]), "float32")


def largest(features, k: int):
    """Keep the k largest features of each token, no more where some are equal; the others are zero.

    Each of them is written to its place among zeros, which takes less time than to compare all
    features with the smallest that is kept.

    Args:
        features: float32[..., latents].
        k: how many.
    """
    rows = ops.reshape(features, (-1, features.shape[-1]))
    values, indices = ops.top_k(rows, k)
    numbers = ops.repeat(ops.arange(ops.shape(rows)[0], dtype="int32"), k)
    places = ops.stack([numbers, ops.cast(ops.reshape(indices, (-1,)), "int32")], axis=-1)
    kept = ops.scatter_update(ops.zeros_like(rows), places, ops.reshape(values, (-1,)))
    return ops.reshape(kept, ops.shape(features))


@keras.saving.register_keras_serializable("backbone_surgery")
class Decoder(_Fixed):
    """Decode features, and mix the reconstruction with what stands there.

    Args:
        latents: number of features.
        size: of a token.
        normalize: what was done to tokens before they were encoded, see `Autoencoder`.
        source_size: of what a transcoder with a skip connection reads.
    """

    def __init__(
        self,
        latents: int,
        size: int,
        normalize: str = "none",
        source_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        shapes = {"weight": (latents, size), "bias": (size,)}
        if source_size is not None:
            shapes["skip"] = (source_size, size)
        settings = {"latents": latents, "size": size, "normalize": normalize}
        super().__init__({**settings, "source_size": source_size}, shapes, **kwargs)

    def call(self, x, features, amount, encoded=None, source=None):
        """Go from x to its reconstruction by an amount, float32[batch].

        With `encoded`, the features before any edit, the error of the reconstruction is kept: x
        changes by what the edit of the features changes. With `source`, what a transcoder reads,
        the skip connection adds to the reconstruction.
        """
        flat = self.flat(x)
        shift, scale = _normalizer(flat, self.settings["normalize"])
        if encoded is None:
            made = (ops.matmul(features, self.weight) + self.bias) * scale + shift
            if source is not None:
                made = made + ops.matmul(ops.cast(source, "float32"), self.skip)
        else:
            made = flat + ops.matmul(features - encoded, self.weight) * scale
        return interpolate(x, ops.reshape(made, ops.shape(x)), amount)

    def compute_output_spec(self, x, features, amount, encoded=None, source=None):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)


@keras.saving.register_keras_serializable("backbone_surgery")
class FeatureSteering(_Fixed):
    """Add a multiple of one feature's decoder row."""

    def __init__(self, feature: int, size: int, **kwargs: Any) -> None:
        super().__init__({"feature": feature, "size": size}, {"direction": (size,)}, **kwargs)

    def call(self, x, amount):
        """Return x + amount · direction; x itself where the amount is zero."""
        amount = ops.reshape(amount, (-1, *[1] * (len(x.shape) - 1)))
        steered = ops.cast(x, "float32") + amount * ops.reshape(self.direction, x.shape[2:])
        return ops.where(ops.equal(amount, 0), x, ops.cast(steered, x.dtype))

    def compute_output_spec(self, x, amount):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)
