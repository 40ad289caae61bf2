"""The head of a backbone that gives logits: the opened graph ends before it, and keeps it."""

from typing import Any

import keras

from backbone_surgery.opening.layers import DirectLayer


class BeforeHead(DirectLayer):
    """Hand hidden states on, and keep the layer that makes logits of them among those of a graph.

    Args:
        head: the layer, whose weights are so weights of the graph.
    """

    def __init__(self, head: keras.layers.Layer) -> None:
        super().__init__(dtype=head.compute_dtype, name=f"before_{head.name}")
        self.head = head

    def call(self, x: Any) -> Any:
        """Return x, float[batch, time, hidden_dim]."""
        return x

    def compute_output_spec(self, x: Any) -> Any:
        """Keep the shape and dtype of x."""
        return keras.KerasTensor(x.shape, x.dtype)


class TableAndHead:
    """A token embedding and a head, called as one `keras.layers.ReversibleEmbedding` is.

    Args:
        table: the embedding.
        head: a `keras.layers.Dense` without a bias or an activation.
    """

    tie_weights = False
    logit_soft_cap = None
    quantization_mode = None

    def __init__(self, table: keras.layers.Embedding, head: keras.layers.Dense) -> None:
        self.table, self.head = table, head
        self.input_dim, self.output_dim = table.input_dim, table.output_dim
        self.compute_dtype, self.dtype_policy = head.compute_dtype, head.dtype_policy

    def __call__(self, inputs: Any, reverse: bool = False) -> Any:
        """Look tokens up, int[batch, time]; or make logits of hidden states, in reverse."""
        return self.head(inputs) if reverse else self.table(inputs)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        """Return what the table or the head says of itself."""
        return (self.head if reverse else self.table).compute_output_spec(inputs)

    @property
    def embeddings(self) -> Any:
        """The table, float[vocabulary, hidden_dim]."""
        return self.table.embeddings

    @property
    def reverse_embeddings(self) -> Any:
        """The weights that make logits, float[hidden_dim, vocabulary]."""
        return self.head.kernel
