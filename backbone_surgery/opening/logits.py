"""Logits of hidden states, by the token embedding in reverse, with gradients where it rounds."""

from typing import Any

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.opening.int4 import widened_rows


class Logits(keras.layers.Layer):
    """Give what `logits_of` gives, as a node of a graph; the backbone stays the owner of weights.

    Args:
        embedding: the token embedding of the backbone.

    Call arguments:
        hidden_states: float[batch, time, hidden_dim].
    """

    __new__ = graph.new_layer

    def __init__(self, embedding: keras.layers.Layer) -> None:
        with graph.untracked():
            super().__init__(dtype=embedding.compute_dtype, name="logits")
            self.embedding = embedding
            self.built = True

    def call(self, hidden_states: Any) -> Any:
        """Return float[batch, time, vocabulary]."""
        return logits_of(self.embedding, hidden_states)

    def compute_output_spec(self, hidden_states: Any) -> Any:
        """Return what the embedding says of itself."""
        return graph.infer(lambda x: self.embedding(x, reverse=True), hidden_states)


def logits_of(embedding: Any, hidden_states: Any) -> Any:
    """Return `embedding(hidden_states, reverse=True)`, with gradients where it rounds.

    An int8 embedding, and an int4 one of a preset, round the hidden states, and so Keras gives no
    gradients but of the rounding's scale. Here they are those of a product with the widened
    kernel, which is what Keras has for its other layers.

    Args:
        embedding: the token embedding.
        hidden_states: float[batch, ..., hidden_dim].
    """
    mode = getattr(embedding, "quantization_mode", None)
    if mode not in ("int8", "int4") or not getattr(embedding, "inputs_quantizer", None):
        return embedding(hidden_states, reverse=True)

    @ops.custom_gradient
    def project(hidden_states: Any) -> Any:
        logits = embedding(hidden_states, reverse=True)

        def gradient(*args: Any, upstream: Any = None) -> Any:
            slope = args[0] if upstream is None else upstream
            if embedding.logit_soft_cap is not None:
                slope = slope * (1 - ops.square(logits / embedding.logit_soft_cap))
            return ops.cast(ops.matmul(slope, _widened(embedding)), hidden_states.dtype)

        return logits, gradient

    return project(hidden_states)


def _widened(embedding: Any) -> Any:
    """Return the kernel of a quantised embedding in reverse, float[vocabulary, hidden_dim]."""
    name = "embeddings" if embedding.tie_weights else "reverse_embeddings"
    scale, zero = (getattr(embedding, f"{name}_{part}", None) for part in ("scale", "zero"))
    if embedding.tie_weights:
        kernel = graph.stored_embeddings(embedding)
    else:
        kernel = ops.transpose(embedding.reverse_embeddings)
        scale, zero = (x if x is None else ops.transpose(x) for x in (scale, zero))
    if embedding.quantization_mode == "int4":
        return widened_rows(embedding, kernel, scale, zero)
    return ops.cast(kernel, embedding.compute_dtype) / ops.reshape(scale, (-1, 1))
