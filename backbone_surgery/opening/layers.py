"""The weightless layers that an opened graph is made of, besides attention."""

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError


class DirectLayer(keras.layers.Layer):
    """A layer that takes tensors in any dtype, and says itself what comes out.

    On symbolic tensors it only adds a node to the graph, which takes a fifth of Keras's own call.
    """

    def __new__(cls, *args, **kwargs):
        builds = cls.build is not keras.layers.Layer.build
        new = super().__new__ if builds else graph.new_layer
        return new(cls, *args, **kwargs)

    def __init__(self, **kwargs) -> None:
        with graph.untracked():
            super().__init__(autocast=False, **kwargs)
            self.built = type(self).build is keras.layers.Layer.build

    def __call__(self, *args, **kwargs):
        if self.built and not kwargs and all(isinstance(x, keras.KerasTensor) for x in args):
            return graph.connect(self, *args)
        return super().__call__(*args, **kwargs)


class TokenPositions(keras.layers.Layer):
    """Number the tokens of each row from its first real token, with padding on either side.

    Call arguments:
        token_ids: int[batch, time].
        padding_mask: int or bool[batch, time].

    Returns:
        int32[batch, time]: 0 at the first token that is no padding, and 0 before it.
    """

    def call(self, token_ids, padding_mask):
        time = ops.arange(ops.shape(token_ids)[1], dtype="int32")
        first = ops.argmax(ops.cast(padding_mask, "int32"), axis=1)
        positions = time[None] - ops.cast(first, "int32")[:, None]
        # Beside a number of Python, Keras makes floats of them where its default is bfloat16.
        return ops.maximum(positions, ops.zeros_like(positions))

    def compute_output_spec(self, token_ids, padding_mask):
        return keras.KerasTensor(token_ids.shape, "int32")


class ChunkMask(keras.layers.Layer):
    """Cut the padding mask of the tokens being run out of the mask of the whole cache.

    Call arguments:
        token_ids: int[batch, time], for its shape.
        cache_mask: bool[batch, length].
        cache_update_index: int32[].

    Returns:
        int32[batch, time].
    """

    def call(self, token_ids, cache_mask, cache_update_index):
        index = ops.cast(cache_update_index, "int32")
        start = (ops.zeros_like(index), index)  # of one dtype, as `write_slots` has them
        return ops.slice(ops.cast(cache_mask, "int32"), start, ops.shape(token_ids))

    def compute_output_spec(self, token_ids, cache_mask, cache_update_index):
        return keras.KerasTensor(token_ids.shape, "int32")


UNKNOWN = np.int32(np.iinfo(np.int32).min)
"""Fills the default of a control that a call of the model must be given: nothing else means it."""


def is_unknown(default: np.ndarray) -> bool:
    """Tell whether a control has no default that a call of the model could use."""
    return default.dtype == UNKNOWN.dtype and default.size > 0 and bool((default == UNKNOWN).all())


class RowConstant(keras.layers.Layer):
    """Give every row the same constant: how a control takes its default inside a training graph.

    Args:
        value: array of one row.

    Call arguments:
        token_ids: int[batch, time], for its batch size.

    Returns:
        value's dtype[batch, *value.shape].
    """

    def __init__(self, value: np.ndarray, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.value = np.asarray(value)

    def call(self, token_ids):
        if is_unknown(self.value):
            name = self.name.removeprefix("default_")
            raise SurgeryError(
                f"call of a model at input '{name}': expected a value, since it counts tokens from "
                "the end of a prompt, and a call does not know where that is. Received none. Use "
                "`generate` or `score`; or call the backbone, and pass int32[batch, 3]: the first "
                "position, the one after the last, and the length of the prompt."
            )
        value = ops.convert_to_tensor(self.value, dtype=self.value.dtype.name)
        return ops.broadcast_to(value[None], (ops.shape(token_ids)[0], *self.value.shape))

    def compute_output_spec(self, token_ids):
        return keras.KerasTensor((token_ids.shape[0], *self.value.shape), self.value.dtype.name)
