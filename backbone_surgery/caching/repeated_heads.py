"""Heads of keys and values kept several times, where more devices than heads share a model.

8 heads do not divide by 16 devices, so each device would keep all of them. Kept twice they are 16:
each device keeps the one that its queries attend to.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from backbone_surgery.opening.attention import AttentionMix, AttentionPattern, SelfAttention
from backbone_surgery.opening.layers import DirectLayer


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


def times_of_heads(layer: Any, devices: int) -> int:
    """Return how often a layer of a graph is to keep each of its heads.

    Args:
        layer: of any kind.
        devices: how many share the heads.

    Returns:
        1, but for attention with fewer heads of keys than devices, where the devices divide by them
        and the heads of queries by the devices. A single head of keys is on each device anyway.
    """
    if type(layer) not in (SelfAttention, AttentionPattern, AttentionMix):
        return 1
    heads = layer.num_key_value_heads
    divides = devices % heads == 0 and layer.num_heads % devices == 0
    return devices // heads if layer.keeps_state and heads > 1 and divides else 1


def repeat_heads(layer: Any, args: tuple, kwargs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return what an attention layer is called with, by name, with keys and values repeated."""
    given = dict(inspect.signature(layer.call).bind(*args, **kwargs).arguments)
    for name in ("key", "value"):
        if name in given:
            given[name] = RepeatedHeads(times, name=f"{layer.name}_repeated_{name}")(given[name])
    return given


def over_repeated_heads(layer: Any, times: int) -> keras.layers.Layer:
    """Return a layer that computes what an attention layer does, over heads that are repeated."""
    settings = {**layer.settings(), "num_key_value_heads": layer.num_key_value_heads * times}
    return type(layer)(**settings, dtype=layer.dtype_policy, name=layer.name)
