"""Weights that a chip wants in another order of axes than they come in: which, and in which order.

They are laid so once, in the variables themselves, or the chip would do it at each call, to a copy.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from backbone_surgery import graph, target
from backbone_surgery.caching.experts import ChosenExperts
from backbone_surgery.caching.projection import form_of
from backbone_surgery.caching.stand_in import StandIn
from backbone_surgery.opening.experts import MixedExperts

_INPUTS_FIRST = "abc,cde->abde"
"""The equation of a projection to heads, by a kernel [inputs, heads, head_dim]."""


def layers_to_lay(model: keras.Model, platform: str) -> list[keras.Layer]:
    """Return the layers of a model that have a weight which its chip may want in another order."""
    if not target.orders_weights(platform):
        return []
    layers = [_behind(node.operation) for node in graph.all_nodes(model)]
    kinds = _is_table, _is_split, _has_experts
    return [x for x in {id(x): x for x in layers}.values() if any(is_one(x) for is_one in kinds)]


def weights_to_lay(
    layers: Iterable[keras.Layer], array_of: Callable[[keras.Variable], Any]
) -> Iterator[tuple[keras.Variable, tuple[int, ...]]]:
    """Yield each weight that is to lie in another order, as it is now, and the order.

    LoRA and quantisation give a layer other variables, so nothing is kept from call to call.

    Args:
        layers: from `layers_to_lay`.
        array_of: gives the array of a weight, or what stands for it, whose `sharding` says how
            devices share it; `None` on one device.
    """
    for layer in layers:
        if _has_experts(layer):
            weights = [getattr(layer.bank, name) for name in layer.shared]
            weights = [x for x in weights if len(x.shape) == 3]
            orders = [_order_of_experts(array_of(x)) for x in weights]
        else:
            weights = graph.own_weights(layer)
            orders = [_order(layer, tuple(x.shape)) for x in weights]
        yield from ((x, order) for x, order in zip(weights, orders, strict=True) if order)


def _order(layer: keras.Layer, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    # A table may have its transpose beside it, for logits.
    is_table = _is_table(layer) and shape == (layer.input_dim, layer.output_dim)
    return target.order_of_weight(shape) if is_table or len(shape) == 3 else None


def _order_of_experts(array: Any) -> tuple[int, ...] | None:
    """Return the order of kernels [experts, inputs, outputs]: experts stay first.

    A TPU may have 128 of them come last, and would turn all of them at each call.
    """
    shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
    return 0, *(axis + 1 for axis in target.order_of_kernel(shape[1:]))


def _behind(layer: keras.Layer) -> keras.Layer:
    """Return the layer whose weights another one reads."""
    if type(layer) is ChosenExperts:
        return layer.mixed
    return layer.layer if isinstance(layer, StandIn) else layer


def _has_experts(layer: keras.Layer) -> bool:
    return type(layer) is MixedExperts


def _is_table(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)


def _is_split(layer: keras.Layer) -> bool:
    return type(layer) is keras.layers.EinsumDense and form_of(layer.equation) == _INPUTS_FIRST
