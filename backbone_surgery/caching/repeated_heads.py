"""Heads of keys and values kept several times, where more devices than heads share a model.

8 heads do not divide by 16 devices, so each device would keep all of them. Kept twice they are 16:
each device keeps the one that its queries attend to.
"""

import inspect
from typing import Any

import keras
from keras import ops

from backbone_surgery.opening.attention import (
    AttentionMix,
    AttentionPattern,
    SelfAttention,
    SharedKeysAndValues,
)
from backbone_surgery.opening.layers import DirectLayer

_ATTENTION = (SelfAttention, AttentionPattern, AttentionMix)


class RepeatedHeads(DirectLayer):
    """Repeat each head, [batch, time, heads, head_dim] to [batch, time, heads * times, head_dim].

    Args:
        times: how often each head comes, one after the other.
    """

    def __init__(self, times: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.times = times

    def call(self, heads):
        """Repeat the heads."""
        return ops.repeat(heads, self.times, axis=2)

    def compute_output_spec(self, heads):
        """Return the shape with more heads."""
        batch, time, count, size = heads.shape
        return keras.KerasTensor((batch, time, count * self.times, size), heads.dtype)


def repeat_heads(
    layer: Any, args: tuple, kwargs: dict[str, Any], devices: int
) -> tuple[int, dict[str, Any]]:
    """Repeat the heads of keys and values that a layer of a graph keeps, or is lent.

    Args:
        layer: of any kind.
        args: what it is called with.
        kwargs: likewise.
        devices: how many share the heads.

    Returns:
        How often each head comes, and what the layer is called with then, by name. Heads that a
        `SharedKeysAndValues` lends come to attention as it keeps them.
    """
    if type(layer) not in (*_ATTENTION, SharedKeysAndValues):
        return 1, kwargs
    given = dict(inspect.signature(layer.call).bind(*args, **kwargs).arguments)
    names = [name for name in ("key", "value") if name in given]
    heads = given[names[0]].shape[2]
    if type(layer) in _ATTENTION and not layer.keeps_state:
        return heads // layer.num_key_value_heads, given
    times = times_of_heads(layer.num_heads, heads, devices)
    if times > 1:
        for name in names:
            repeat = RepeatedHeads(times, name=f"{layer.name}_repeated_{name}")
            given[name] = repeat(given[name])
    return times, given


def times_of_heads(queries: int, heads: int, devices: int) -> int:
    """Return how often each head of keys is to be kept.

    Args:
        queries: how many heads of queries there are.
        heads: how many heads of keys.
        devices: how many share the heads.

    Returns:
        1, but for fewer heads of keys than devices, where the devices divide by them and the heads
        of queries by the devices. A single head of keys is on each device anyway.
    """
    divides = devices % heads == 0 and queries % devices == 0
    return devices // heads if heads > 1 and divides else 1


def over_repeated_heads(layer: Any, times: int) -> keras.layers.Layer:
    """Return a layer that computes what a layer does, over heads that are repeated."""
    if type(layer) is SharedKeysAndValues:  # it takes any number of them
        return layer
    settings = {**layer.settings(), "num_key_value_heads": layer.num_key_value_heads * times}
    return type(layer)(**settings, dtype=layer.dtype_policy, name=layer.name)
