"""Logits by a plain `keras.layers.Embedding`, whose weights make them too, as in Gemma 3n."""

from typing import Any

import keras
from keras import ops

from backbone_surgery import graph
from backbone_surgery.opening.int4 import widened_rows


class TiedHead(keras.layers.Layer):
    """Make logits of hidden states by the table that tokens are looked up in.

    It is called like a `keras.layers.ReversibleEmbedding`, and has its attributes. Of a table that
    is quantised the weights are widened; the hidden states are not rounded.

    Args:
        table: the embedding, built. It stays the owner of the weights.
        logit_soft_cap: logits become `cap * tanh(logits / cap)`.

    Call arguments:
        inputs: float[batch, ..., output_dim]; in the other direction int[batch, time].
        reverse: whether logits are wanted.
    """

    tie_weights = True

    def __init__(self, table: keras.layers.Embedding, logit_soft_cap: float | None = None) -> None:
        super().__init__(dtype=table.compute_dtype, name="tied_head")
        self.table, self.logit_soft_cap = table, logit_soft_cap
        self.input_dim, self.output_dim = table.input_dim, table.output_dim
        self.built = True

    @property
    def embeddings(self) -> Any:
        """The weights, float or int[input_dim, output_dim]."""
        return self.table.embeddings

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Return float[batch, ..., input_dim], or what tokens are embedded as."""
        if not reverse:
            return self.table(inputs)
        logits = ops.matmul(inputs, ops.transpose(self._weights()))
        cap = self.logit_soft_cap
        return logits if cap is None else ops.tanh(logits / cap) * cap

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        """Return the shape of either."""
        if not reverse:
            return self.table.compute_output_spec(inputs)
        return keras.KerasTensor((*inputs.shape[:-1], self.input_dim), self.compute_dtype)

    def _weights(self) -> Any:
        """Return the weights as floats, with LoRA."""
        table = self.table
        if table.quantization_mode is None:
            return ops.cast(table.embeddings, self.compute_dtype)
        stored = ops.convert_to_tensor(graph.stored_embeddings(table))
        scale = ops.convert_to_tensor(table.embeddings_scale)
        if table.quantization_mode == "int4":
            weights = widened_rows(table, stored, scale, getattr(table, "embeddings_zero", None))
        else:
            weights = ops.cast(stored, self.compute_dtype) / ops.reshape(scale, (-1, 1))
        if table.lora_enabled:
            change = ops.matmul(table.lora_embeddings_a, table.lora_embeddings_b)
            weights = weights + change * (table.lora_alpha / table.lora_rank)
        return ops.cast(weights, self.compute_dtype)
