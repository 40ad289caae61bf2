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
    """Return the layers of a model that have a weight which a chip may want in another order."""
    layers = [getattr(n.operation, "dense", n.operation) for n in graph.all_nodes(model)]
    return [x for x in {id(x): x for x in layers}.values() if _is_table(x) or _is_split(x)]


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
            shape = tuple(weight.shape)
            # A table may have its transpose beside it, for logits.
            table = _is_table(layer) and shape == (layer.input_dim, layer.output_dim)
            order = target.order_of_weight(platform, shape) if table or len(shape) == 3 else None
            if order is not None:
                yield weight, order


def _is_table(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)


def _is_split(layer: keras.Layer) -> bool:
    return type(layer) is keras.layers.EinsumDense and form_of(layer.equation) == _INPUTS_FIRST
