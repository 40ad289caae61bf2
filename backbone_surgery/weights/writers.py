"""Which weights write a site: those that can hold an edit of it."""

from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.opening.experts import MixedExperts
from backbone_surgery.opening.site import Site


def biases(tensor: keras.KerasTensor) -> tuple[list[keras.Variable], bool]:
    """Return the bias that a constant at a site can be added to, if any.

    Returns:
        A list of one, or none; and whether it is added to a term of a sum that stands there.
    """
    node = _source(tensor)
    if _is_linear(node.operation):
        return _named(node.operation, "bias"), False
    terms = node.input_tensors if isinstance(node.operation, keras.layers.Add) else ()
    for layer in (_source(term).operation for term in terms):
        if _is_linear(layer) and layer.bias is not None:
            return _named(layer, "bias"), True
    return [], False


def all_that_write(tensor: keras.KerasTensor) -> list[keras.Variable] | str:
    """Return the weights whose last axis is that of a site, and without which nothing is there.

    Returns:
        The weights: of a linear layer, of all experts of a mixture, of a token embedding, or of all
        terms of a sum. Or why there are none.
    """
    node = _source(tensor)
    layer = node.operation
    if _is_linear(layer):
        return _named(layer, "kernel", "bias")
    if isinstance(layer, keras.layers.Embedding):
        if getattr(layer, "tie_weights", False):
            return f"the weights of '{layer.name}' make the logits too"
        return _named(layer, "embeddings")
    if isinstance(layer, MixedExperts):
        kernels = [getattr(layer.bank, name) for name, axis in layer.shared.items() if axis == 1]
        added = [getattr(layer.bank, name) for name, is_added in layer.whole.items() if is_added]
        return [*(kernel for kernel in kernels if len(kernel.shape) == 3), *added]
    if isinstance(layer, keras.layers.Add):
        return _of_all(node.input_tensors)
    if isinstance(layer, GatedProduct) and node.input_tensors[0].shape[-1] == 1:
        return all_that_write(node.input_tensors[1])
    return f"'{layer.name}' writes that site, or a part of it, and is no linear layer"


def _of_all(terms: list[keras.KerasTensor]) -> list[keras.Variable] | str:
    found: list[keras.Variable] = []
    for weights in map(all_that_write, terms):
        if isinstance(weights, str):
            return weights
        found += weights
    return found


def _source(tensor: keras.KerasTensor) -> Any:
    """Return the node that made a tensor, looking through sites and dropout."""
    node = graph.node_of(tensor)
    while isinstance(node.operation, Site | keras.layers.Dropout):
        node = graph.node_of(node.input_tensors[0])
    return node


def _is_linear(layer: Any) -> bool:
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and layer.activation in (None, keras.activations.linear)


def _named(layer: Any, *names: str) -> list[keras.Variable]:
    """Return variables by name: with LoRA on, `layer.kernel` is a sum and no variable."""
    return [weight for weight in graph.own_weights(layer) if weight.name in names]
