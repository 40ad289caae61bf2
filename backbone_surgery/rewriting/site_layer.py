"""The layers that rewrites put at sites: what they share."""

import keras
from keras import ops

from backbone_surgery.opening.layers import DirectLayer


class SiteLayer(DirectLayer):
    """A layer whose output has the shape and dtype of its first argument.

    Its other arguments are inputs of the graph. No autocast touches them.
    """

    def compute_output_spec(self, x, *others):
        """Keep the shape and dtype of `x`."""
        return keras.KerasTensor(x.shape, x.dtype)


def along(x, basis):
    """Return the part of float32[batch, time, size] that lies in the span of some directions.

    Args:
        x: float32[batch, time, size].
        basis: float32[batch, rank, size], with orthonormal rows, or rows of zero.
    """
    part = 0.0
    for i in range(basis.shape[1]):
        unit = basis[:, i, None]
        # A sum, not a product of matrices, which accelerators round to bfloat16.
        part = part + ops.sum(x * unit, axis=-1, keepdims=True) * unit
    return part


def interpolate(x, other, amount):
    """Go from `x` to `other`, row by row; an amount of 0 or 1 gives exactly one of them.

    Args:
        x: float[batch, time, ...].
        other: the same shape, in any float dtype.
        amount: float32[batch].
    """
    amount = ops.reshape(amount, (-1, *[1] * (len(x.shape) - 1)))
    start, end = ops.cast(x, "float32"), ops.cast(other, "float32")
    mixed = ops.where(ops.equal(amount, 1), end, start + amount * (end - start))
    return ops.where(ops.equal(amount, 0), x, ops.cast(mixed, x.dtype))
