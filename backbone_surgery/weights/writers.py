"""Which weights write a site: those that can hold an edit of it."""

from collections import Counter
from typing import Any

import keras

from backbone_surgery import graph
from backbone_surgery.families.parts import GatedProduct
from backbone_surgery.opening.experts import MixedExperts
from backbone_surgery.opening.site import Site


class Writers:
    """Finds them in an opened graph.

    What another layer reads too, or a layer that runs at several places writes, is refused: to fold
    an edit into it would change more than the site.

    Args:
        opened: the graph.
        untied: whether the logits get weights of their own, where the token embedding makes them.
    """

    def __init__(self, opened: keras.Model, untied: bool) -> None:
        self._untied = untied
        nodes = list(graph.all_nodes(opened))
        self._readers = Counter(id(t) for node in nodes for t in node.input_tensors)
        self._runs = Counter(id(node.operation) for node in nodes)

    def biases(self, tensor: keras.KerasTensor) -> tuple[list[keras.Variable], bool]:
        """Return the bias that a constant at a site can be added to, if any.

        Returns:
            A list of one, or none; and whether it is added to a term of a sum that stands there.
        """
        node = self._source(tensor, at_site=True)
        if node is None:
            return [], False
        if _is_linear(node.operation):
            return self._weights(node.operation, "bias"), False
        terms = node.input_tensors if isinstance(node.operation, keras.layers.Add) else ()
        for layer in (made.operation for made in map(self._source, terms) if made is not None):
            if _is_linear(layer) and (found := self._weights(layer, "bias")):
                return found, True
        return [], False

    def all_that_write(
        self, tensor: keras.KerasTensor, at_site: bool = True
    ) -> list[keras.Variable] | str:
        """Return the weights whose last axis is that of a site, and all that stands there is of.

        Args:
            tensor: what stands at a site, or is a part of it.
            at_site: whether it is the site itself, which others may read.

        Returns:
            The weights: of a linear layer, of all experts of a mixture, of a token embedding, or of
            all terms of a sum. Or why there are none.
        """
        node = self._source(tensor, at_site)
        layer = (node or graph.node_of(tensor)).operation
        if getattr(layer, "tie_weights", False) and not self._untied:
            return f"the weights of '{layer.name}' make the logits too"
        if node is None:
            return "a part of it is read by other layers too, as the residual stream is"
        if isinstance(layer, keras.layers.Add):
            return self._of_all(node.input_tensors)
        if isinstance(layer, GatedProduct) and node.input_tensors[0].shape[-1] == 1:
            return self.all_that_write(node.input_tensors[1], at_site=False)
        if isinstance(layer, MixedExperts):
            found = _of_experts(layer) if self._runs[id(layer)] == 1 else []
        elif _is_linear(layer) or isinstance(layer, keras.layers.Embedding):
            found = self._weights(layer, "kernel", "bias", "embeddings")
        else:
            return f"'{layer.name}' writes that site, or a part of it, and is no linear layer"
        return found or f"'{layer.name}' writes at other places too"

    def _of_all(self, terms: list[keras.KerasTensor]) -> list[keras.Variable] | str:
        found: list[keras.Variable] = []
        for term in terms:
            weights = self.all_that_write(term, at_site=False)
            if isinstance(weights, str):
                return weights
            found += weights
        return found

    def _source(self, tensor: keras.KerasTensor, at_site: bool = False) -> Any:
        """Return the node that made a tensor, looking through sites and dropout.

        `None`, if something else reads what is on the way there.
        """
        if not at_site and self._readers[id(tensor)] != 1:
            return None
        node = graph.node_of(tensor)
        if not isinstance(node.operation, Site | keras.layers.Dropout):
            return node
        return self._source(node.input_tensors[0])

    def _weights(self, layer: Any, *names: str) -> list[keras.Variable]:
        """Return variables by name: with LoRA on, `layer.kernel` is a sum and no variable."""
        if self._runs[id(layer)] != 1:
            return []
        return [weight for weight in graph.own_weights(layer) if weight.name in names]


def _of_experts(layer: MixedExperts) -> list[keras.Variable]:
    kernels = [getattr(layer.bank, name) for name, axis in layer.shared.items() if axis == 1]
    added = [getattr(layer.bank, name) for name, is_added in layer.whole.items() if is_added]
    return [*(kernel for kernel in kernels if len(kernel.shape) == 3), *added]


def _is_linear(layer: Any) -> bool:
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and layer.activation in (None, keras.activations.linear)
