"""Weightless layers for AltUp: several streams of hidden states, one of which each block runs on.

A block predicts all streams from what came in, runs on the prediction of the active one, and
corrects the others by how far off that was (https://arxiv.org/abs/2301.13310). Between blocks the
active stream, the first, is float[batch, time, hidden_dim], and the others, in order, are
float[batch, time, others, hidden_dim].
"""

import keras
from keras import layers, ops


class TakeStream(layers.Layer):
    """Take one of several: float[batch, time, streams, features] to float[batch, time, features].

    Args:
        index: which.
    """

    def __init__(self, index: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.index = index

    def call(self, x):
        return x[:, :, self.index]

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:2], x.shape[3]), self.compute_dtype)


class StackStreams(layers.Layer):
    """Put streams side by side: float[batch, time, streams, hidden_dim]."""

    def call(self, *streams):
        return ops.stack(streams, axis=2)

    def compute_output_spec(self, *streams):
        batch, time, features = streams[0].shape
        return keras.KerasTensor((batch, time, len(streams), features), self.compute_dtype)


class MeanStream(layers.Layer):
    """Take the mean of streams, each float[batch, time, hidden_dim]."""

    def call(self, *streams):
        return ops.mean(ops.stack(streams, axis=0), axis=0)

    def compute_output_spec(self, *streams):
        return keras.KerasTensor(streams[0].shape, self.compute_dtype)


class AsLargeAs(layers.Layer):
    """Scale each token of a stream to the root mean square of the same token of another one.

    Call arguments:
        x: float[batch, time, hidden_dim].
        other: float[batch, time, hidden_dim].
    """

    def call(self, x, other):
        wanted = ops.sqrt(ops.mean(ops.square(other), axis=-1, keepdims=True))
        square = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * wanted / ops.sqrt(ops.maximum(square, ops.cast(1e-5, x.dtype)))

    def compute_output_spec(self, x, other):
        return keras.KerasTensor(x.shape, self.compute_dtype)


class _Streams(layers.Layer):
    """What is computed of all streams: it returns the active one, the first, and the others."""

    def joined(self, stream, others):
        """Return all streams, float[batch, time, streams, hidden_dim]."""
        return ops.concatenate([stream[:, :, None], others], axis=2)

    def parted(self, streams):
        """Return the active stream, and the others."""
        return streams[:, :, 0], streams[:, :, 1:]

    def compute_output_spec(self, _, stream, others, *more):
        shapes = stream.shape, others.shape
        return tuple(keras.KerasTensor(shape, self.compute_dtype) for shape in shapes)


class PredictStreams(_Streams):
    """Predict each stream: itself, and a mix of all.

    Call arguments:
        weights: float[batch, time, streams * streams], for each stream those of all.
        stream: float[batch, time, hidden_dim], the active one.
        others: float[batch, time, others, hidden_dim].
    """

    def call(self, weights, stream, others):
        streams = self.joined(stream, others)
        batch, time, count, _ = ops.shape(streams)
        mixed = ops.matmul(ops.reshape(weights, (batch, time, count, count)), streams)
        return self.parted(mixed + streams)


class CorrectStreams(_Streams):
    """Correct the predicted streams by what the block made of the active one.

    Call arguments:
        weights: float[batch, time, streams], less 1.
        stream: float[batch, time, hidden_dim], as predicted.
        others: float[batch, time, others, hidden_dim], as predicted.
        made: float[batch, time, hidden_dim].
    """

    def call(self, weights, stream, others, made):
        change = (made - stream)[:, :, None] * (weights + 1.0)[..., None]
        return self.parted(change + self.joined(stream, others))


class AddToStreams(layers.Layer):
    """Add something to all streams but the first.

    Call arguments:
        made: float[batch, time, hidden_dim].
        others: float[batch, time, others, hidden_dim].
    """

    def call(self, made, others):
        return others + made[:, :, None]

    def compute_output_spec(self, made, others):
        return keras.KerasTensor(others.shape, self.compute_dtype)


class Tanh(layers.Layer):
    """Compute the hyperbolic tangent in float32."""

    def call(self, x):
        return ops.cast(ops.tanh(ops.cast(x, "float32")), self.compute_dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)
