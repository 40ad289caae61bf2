"""`HeadProjection`: an `EinsumDense` over attention heads, whose kernel is read as it lies.

Where the heads of a kernel come before its inputs, the plain einsum makes XLA copy the
kernel into another order, at each token that is decoded. A product for each head needs no copy.
"""

from typing import Any

import keras
from keras import ops

from backbone_surgery.caching.stand_in import StandIn

SPLIT = "abc,dce->abde"
_JOIN = "abcd,cde->abe"


def projects_heads(layer: Any, compute_dtype: str) -> bool:
    """Tell whether a layer of a model that computes in a dtype can be run by a `HeadProjection`."""
    if type(layer) is not keras.layers.EinsumDense or layer.quantization_mode is not None:
        return False
    like_the_model = layer.autocast and layer.compute_dtype == compute_dtype
    return like_the_model and form_of(layer.equation) in (SPLIT, _JOIN)


class HeadProjection(StandIn):
    """Compute what an `EinsumDense` computes, which stays the owner of the weights.

    Args:
        layer: the layer, built. Its kernel is float[num_heads, inputs, head_dim], to heads, or
            float[num_heads, head_dim, outputs], from them. Once it has LoRA or quantised weights,
            it is called itself.

    Call arguments:
        inputs: float[batch, time, inputs], or float[batch, time, num_heads, head_dim].

    Returns:
        float[batch, time, num_heads, head_dim], or float[batch, time, outputs].
    """

    def call(self, inputs, training=None):
        """Project the inputs; `training` is what the layer takes too, and changes nothing."""
        dense = self.layer
        if dense.lora_enabled or dense.quantization_mode is not None:
            return dense(inputs)
        y = product(dense, inputs, ops.convert_to_tensor(dense.kernel))
        return finished(dense, y)


def product(dense: Any, x: Any, kernel: Any) -> Any:
    """Return the product that a `Dense` or an `EinsumDense` takes, the kernel read as it lies."""
    if isinstance(dense, keras.layers.Dense):
        return ops.matmul(x, kernel)
    form = form_of(dense.equation)
    if form in (SPLIT, _JOIN):
        return (_to_heads if form == SPLIT else _from_heads)(x, kernel)
    return ops.einsum(dense.equation, x, kernel)


def finished(dense: Any, y: Any) -> Any:
    """Add the bias of a layer to its product, and apply its activation."""
    y = y if dense.bias is None else y + dense.bias
    return y if dense.activation is None else dense.activation(y)


def is_quantised(layer: Any, mode: str) -> bool:
    """Tell whether a layer is a `Dense` or an `EinsumDense` quantised so, and casts its inputs."""
    is_projection = type(layer) in (keras.layers.Dense, keras.layers.EinsumDense)
    return is_projection and layer.quantization_mode == mode and layer.autocast


def works_by_token(layer: keras.layers.EinsumDense) -> bool:
    """Tell whether an `EinsumDense` leaves rows and tokens, its first two axes, as they are."""
    x, kernel, y = axes_of(layer)
    return x[:2] == y[:2] and not set(x[:2]) & set(kernel)


def axes_of(layer: keras.layers.EinsumDense) -> list[str]:
    """Return the letters of the axes of input, kernel and output."""
    return layer.equation.replace("->", ",").split(",")


def _to_heads(x, kernel):
    batch, time, inputs = ops.shape(x)
    heads, _, head_dim = ops.shape(kernel)
    rows = ops.broadcast_to(
        ops.reshape(x, (1, batch * time, inputs)), (heads, batch * time, inputs)
    )
    y = ops.transpose(ops.matmul(rows, kernel), (1, 0, 2))
    return ops.reshape(y, (batch, time, heads, head_dim))


def _from_heads(x, kernel):
    batch, time, heads, head_dim = ops.shape(x)
    rows = ops.reshape(x, (batch, time, heads * head_dim))
    return ops.matmul(rows, ops.reshape(kernel, (heads * head_dim, ops.shape(kernel)[2])))


def form_of(equation: str) -> str:
    """Rename the letters of an equation in the order in which they come."""
    letters = dict.fromkeys(c for c in equation if c.isalpha())
    return equation.translate({ord(c): chr(ord("a") + i) for i, c in enumerate(letters)})
