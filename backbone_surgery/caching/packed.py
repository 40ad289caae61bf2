"""Layers quantised to int4, whose weights are read as they are packed."""

import math
from typing import Any

import keras
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.caching.packed_matrix import matrix_of, product, takes
from backbone_surgery.caching.packed_shares import look_up_on_mesh, product_on_mesh, share_of
from backbone_surgery.caching.projection import finished
from backbone_surgery.caching.stand_in import StandIn
from backbone_surgery.opening.head import TableAndHead
from backbone_surgery.opening.int4 import widened_rows


class PackedProjection(StandIn):
    """Compute what a layer quantised to int4 computes, which stays the owner of the weights.

    XLA unpacks the kernel to memory first, at each token. Where no kernel takes it, such as with
    many tokens, the layer itself is called. On a mesh each device runs its share.

    Args:
        layer: the layer, built. Once it has LoRA, or is quantised in another way, it is called.

    Call arguments:
        inputs: float[batch, time, ...].
    """

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Project the inputs; `training` is what the layer takes too, and changes nothing."""
        y = _product(self.layer, inputs)
        if y is None:
            return self.layer(inputs)
        shape = self.compute_output_spec(inputs).shape[2:]
        return finished(self.layer, ops.reshape(y, (*y.shape[:2], *shape)))


def is_packed_table(layer: Any) -> bool:
    """Tell whether tokens can be looked up in a layer by a `PackedEmbedding`."""
    is_table = type(layer) in (keras.layers.Embedding, keras.layers.ReversibleEmbedding)
    return is_table and layer.quantization_mode == "int4"


class PackedEmbedding(StandIn):
    """Look tokens up in a table quantised to int4, whose layer stays the owner of the weights.

    Keras unpacks the whole table first. Here what was looked up is unpacked.

    Args:
        layer: the layer, built. Once it has LoRA, or is quantised in another way, it is called.

    Call arguments:
        inputs: int[batch, time].
    """

    def call(self, inputs: Any) -> Any:
        """Return float[batch, time, hidden_dim]."""
        table = self.layer
        if not is_packed_table(table) or table.lora_enabled:
            return table(inputs)
        tokens, stored = ops.cast(inputs, "int32"), graph.stored_embeddings(table)
        variables = stored, table.embeddings_scale, getattr(table, "embeddings_zero", None)
        arrays = [ops.convert_to_tensor(x) for x in variables if x is not None]
        placement = target.placement()
        if placement is not None and placement.axis_of(stored) == 0:
            return look_up_on_mesh(self._look_up, tokens, arrays, placement)
        return self._look_up(tokens, arrays)

    def _look_up(self, tokens: Any, arrays: list[Any]) -> Any:
        """Look tokens up in numbers, scales and, if there are any, what zero is."""
        return widened_rows(self.layer, *(ops.take(x, tokens, axis=0) for x in arrays))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return which tokens are some, where the layer masks zeros."""
        return self.layer.compute_mask(inputs, mask)


def logits_of(head: Any, states: Any) -> Any:
    """Return the logits of hidden states, by a table that may be quantised to int4.

    Args:
        head: the layer that holds the table.
        states: float[batch, time, hidden_dim].
    """
    if isinstance(head, TableAndHead):
        return PackedProjection(head.head)(states)
    logits = _product(head, states)
    if logits is None:
        return head(states, reverse=True)
    cap = head.logit_soft_cap
    return logits if cap is None else ops.tanh(logits / cap) * cap


def reads_packed(layer: Any, rows: int) -> bool:
    """Tell whether the program that is being made reads the matrix of a layer as it is packed.

    Args:
        layer: any.
        rows: that each device runs, each with one token.
    """
    packed, placement = matrix_of(layer), target.placement()
    if packed is None:
        return False
    if placement is not None:
        packed = share_of(packed, placement)
    with target.on_each_device():
        return takes(rows, packed, layer.compute_dtype)


def _product(layer: Any, x: Any) -> Any | None:
    """Multiply tokens by the matrix of a layer, if it can be read as it is packed.

    Args:
        layer: any.
        x: float[batch, time, ...].

    Returns:
        float[batch, time, outputs], or `None`.
    """
    batch, time = x.shape[:2]
    packed, placement = matrix_of(layer), target.placement()
    is_sized = isinstance(batch, int) and isinstance(time, int)
    if packed is None or not is_sized or math.prod(x.shape[2:]) != packed.inputs:
        return None  # a `Dense` takes arrays of any rank
    if placement is None and not reads_packed(layer, batch * time):
        return None
    scale = None
    if layer.inputs_quantizer:  # KerasHub loads heads so
        x, scale = layer.inputs_quantizer(x)
    x = ops.reshape(ops.cast(x, layer.compute_dtype), (batch, time, packed.inputs))
    if placement is not None:
        y = product_on_mesh(x, packed, placement)
    else:
        y = product(x, packed._replace(**packed.tensors()))
    return y if scale is None else y / ops.cast(scale, y.dtype)
