"""Weights that a chip wants in another order of axes than they come in: which, and in which order.

They are laid so once, in the variables themselves, or the chip would do it at each call, to a copy.
"""

from collections.abc import Iterable, Iterator

import keras

from backbone_surgery import graph, target
from backbone_surgery.caching.projection import form_of

_INPUTS_FIRST = "abc,cde->abde"
"""The equation of a projection to heads, by a kernel [inputs, heads, head_dim]."""


def layers_to_lay(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model whose weights a chip may want in another order."""
    layers = [getattr(n.operation, "dense", n.operation) for n in graph.all_nodes(model)]
    return [x for x in {id(x): x for x in layers}.values() if _axes(x) is not None]


def weights_to_lay(
    layers: Iterable[keras.Layer], platform: str
) -> Iterator[tuple[keras.Variable, tuple[int, ...]]]:
    """Yield each weight that is to lie in another order, as it is now, and the order.

    LoRA and quantisation give a layer other variables, so nothing is kept from call to call.

    Args:
        layers: from `layers_to_lay`.
        platform: where they run; see `target`.
    """
    for layer in layers:
        for weight in graph.own_weights(layer):
            if len(weight.shape) == _axes(layer):
                order = target.order_of_weight(platform, weight.shape)
                if order is not None:
                    yield weight, order


def _axes(layer: keras.Layer) -> int | None:
    """Return how many axes the weight of a layer has that may be laid, or `None` if none may."""
    if isinstance(layer, keras.layers.Embedding):
        return 2
    heads = type(layer) is keras.layers.EinsumDense and form_of(layer.equation) == _INPUTS_FIRST
    return 3 if heads else None
