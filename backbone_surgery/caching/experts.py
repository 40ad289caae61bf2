"""`ChosenExperts`: a mixture that runs the chosen experts alone, while few tokens are run.

KerasHub runs all experts on each token. For one token most of what is read is then of no use, and
reading weights is what decoding waits for.
"""

from typing import Any

import keras
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.opening.experts import Experts, MixedExperts, TopExperts
from backbone_surgery.opening.site import Identity

_PIECE_BYTES = 2**22
"""How much is copied at a time on a CPU: less than its cache holds."""

_IN_TURN = 16
"""How many experts are run one after the other, on a TPU. Each is written out in the program."""


def most_chosen(weights: keras.KerasTensor) -> int | None:
    """Return how many experts have a weight that is not zero, at most, or `None` if all may.

    That is so where the weights come from `TopExperts`, and nothing was put between that gives
    weight to an expert that had none. Layers with `keeps_zeros` do not.
    """
    while True:
        node = graph.node_of(weights)
        layer = node.operation
        if type(layer) is TopExperts:
            return layer.top_k
        if not (isinstance(layer, Identity) or getattr(layer, "keeps_zeros", False)):
            return None
        weights = node.input_tensors[0]


class ChosenExperts(keras.layers.Layer):
    """Compute what a `MixedExperts` computes, reading for each token the experts that it weighs.

    Args:
        mixed: the layer.
        top_k: how many weights of a token are not zero, at most.

    Call arguments:
        x: float[batch, time, hidden_dim].
        weights: float[batch, time, experts].

    Returns:
        float[batch, time, hidden_dim].
    """

    def __init__(self, mixed: MixedExperts, top_k: int, **kwargs) -> None:
        super().__init__(dtype=mixed.dtype_policy, name=f"chosen_{mixed.name}", **kwargs)
        self.mixed, self.top_k = mixed, top_k

    def call(self, x, weights):
        """Run the experts that each token weighs; all, once that would read as many kernels.

        A TPU multiplies by one expert after the other, so there they are few.
        """
        batch, time, hidden_dim = ops.shape(x)
        count = weights.shape[-1]
        sizes_are_known = isinstance(batch, int) and isinstance(time, int)
        most = min(count, _IN_TURN + 1) if target.platform() == "tpu" else count
        if not (sizes_are_known and batch * time * self.top_k < most):
            return self.mixed(x, weights)
        shares, index = ops.top_k(ops.reshape(weights, (batch * time, count)), self.top_k)
        pairs = ops.repeat(ops.reshape(x, (batch * time, 1, hidden_dim)), self.top_k, axis=0)
        chosen = _Chosen(self.mixed.bank, ops.reshape(index, (-1,)), self.compute_dtype)
        made = self.mixed.expert(pairs, chosen)
        made = ops.reshape(made, (batch * time, self.top_k, hidden_dim)) * shares[..., None]
        return ops.reshape(ops.sum(made, axis=1), (batch, time, hidden_dim))

    def compute_output_spec(self, x, weights):
        """Return what the layer says of itself."""
        return keras.KerasTensor(x.shape, self.compute_dtype)


class _Chosen(Experts):
    """Experts of a bank, one for each token: what is float[experts, ...] is float[tokens, ...].

    Weights are cast after they are taken: cast before, the whole bank would be read.

    Args:
        bank: the layer that owns the kernels.
        index: int[tokens], the expert of each token.
        dtype: the dtype that is computed in.
    """

    def __init__(self, bank: keras.layers.Layer, index: Any, dtype: str) -> None:
        super().__init__(bank)
        self.index, self.dtype = index, dtype

    def project(self, x: Any, name: str) -> Any:
        """Multiply float[tokens, 1, inputs] by the kernels of the experts.

        The kernels are copied together before they are multiplied. On a CPU that is done in pieces
        that stay in its cache, so that memory is read once and not written. Not so for kernels in
        half precision: XLA on a CPU would make float32 of the whole bank, in a loop. On a GPU they
        are multiplied and added up, and on a TPU multiplied in turn, which XLA makes one kernel
        with the taking, and copies nothing.
        """
        kernel = self.kernel(name)
        experts, inputs, outputs = kernel.shape
        tokens = x.shape[0]
        if target.platform() == "tpu":
            return ops.stack([self._times_one(x[:, 0], kernel, i) for i in range(tokens)])
        if target.platform() == "gpu":
            wide = ops.cast(self._take(kernel, self.index), "float32")
            total = ops.sum(ops.cast(x[:, 0, :, None], "float32") * wide, axis=1)
            return ops.cast(total, x.dtype)[:, None]
        in_pieces = (
            target.platform() == "cpu"
            and keras.backend.standardize_dtype(kernel.dtype) == "float32"
        )
        size = _piece(inputs, tokens * outputs * kernel.dtype.itemsize) if in_pieces else inputs
        if size == inputs:
            return ops.matmul(x, self._take(kernel, self.index))
        count = inputs // size
        pieces = ops.reshape(kernel, (experts * count, size, outputs))

        def add(i: Any, total: Any) -> Any:
            part = ops.slice(x, (0, 0, i * size), (tokens, 1, size))
            product = ops.matmul(part, self._take(pieces, self.index * count + i))
            return total + ops.cast(product, "float32")

        total = ops.fori_loop(0, count, add, ops.zeros((tokens, 1, outputs), "float32"))
        return ops.cast(total, x.dtype)

    def _times_one(self, x: Any, kernel: Any, token: int) -> Any:
        """Multiply all tokens by the kernel that one chose, and keep its own row: [1, outputs].

        A product of one row would become a sum, which no matrix unit computes.
        """
        start, size = (self.index[token], 0, 0), (1, *kernel.shape[1:])
        one = ops.cast(ops.slice(kernel, start, size)[0], self.dtype)
        return ops.matmul(x, one)[token : token + 1]

    def vector(self, name: str) -> Any:
        return self._take(super().vector(name), self.index)

    def kernel(self, name: str) -> Any:
        """Return a weight of the bank as it lies, in the dtype in which it is stored."""
        with graph.as_stored():
            return super().kernel(name)

    def _take(self, kernel: Any, index: Any) -> Any:
        return ops.cast(ops.take(kernel, index, axis=0), self.dtype)


def _piece(inputs: int, row_bytes: int) -> int:
    """Return how many inputs of a kernel to take at a time on a CPU."""
    most = max(_PIECE_BYTES // row_bytes, 1)
    return max(size for size in range(1, min(inputs, most) + 1) if inputs % size == 0)
