"""Gated DeltaNet, the linear attention of Qwen 3.5, and the gate of what heads give."""

import keras
from keras import layers, ops

from backbone_surgery.families.parts import JoinHeads, Split, SplitHeads
from backbone_surgery.opening.recurrence import DECAY, WRITE_STRENGTH, CausalConvolution, DeltaRule
from backbone_surgery.opening.site import Site


class Decay(layers.Layer):
    """The share of its state that each head keeps at a token, float32[batch, time, heads].

    Args:
        rate: logarithm of the rates of the heads, float[heads].
        bias: of the rates' steps, float[heads]. Both are weights that the block itself owns.

    Call arguments:
        x: float[batch, time, heads].
    """

    def __init__(self, rate: keras.Variable, bias: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rate, self.bias = rate, bias

    def call(self, x):
        rate = ops.exp(ops.cast(self.rate, "float32"))
        x = ops.cast(x, "float32") + ops.cast(self.bias, "float32")
        return ops.exp(-rate * ops.softplus(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


def gated(x, gate, activation, policy):
    """Multiply what heads give by the activation of a gate, which is the site `output_gate`."""
    gate = layers.Activation(activation, dtype=policy, name="output_gate")(gate)
    return layers.Multiply(dtype=policy, name="gated_heads")([x, Site("output_gate")(gate)])


def linear_attention(layer, x, padding_mask, policy):
    """Spell out a Gated DeltaNet, from its input to its output projection."""
    gate_heads = SplitHeads(layer.head_v_dim, dtype=policy, name="gate_heads")
    gate = gate_heads(layer.in_proj_z(x))
    convolution = CausalConvolution(layer.conv1d_weight, dtype=policy, name="convolution")
    mixed = convolution(layer.in_proj_qkv(x), padding_mask)
    mixed = layers.Activation("silu", dtype=policy, name="convolution_activation")(mixed)

    split = Split(layer.key_dim, 2 * layer.key_dim, dtype=policy, name="query_key_value")

    def heads(name, x, size):
        return Site(name)(SplitHeads(size, dtype=policy, name=f"{name}_heads")(x))

    query, key, value = split(mixed)
    query = heads("query", query, layer.head_k_dim)
    key = heads("key", key, layer.head_k_dim)
    value = heads("value", value, layer.head_v_dim)
    decay = Decay(layer.A_log, layer.dt_bias, dtype=policy, name=DECAY)
    decay = Site(DECAY)(decay(layer.in_proj_a(x)))
    strength = layers.Activation("sigmoid", dtype=policy, name=WRITE_STRENGTH)
    strength = Site(WRITE_STRENGTH)(strength(layer.in_proj_b(x)))
    rule = DeltaRule(dtype=policy, name="delta_rule")
    x = layer.norm(rule(query, key, value, decay, strength, padding_mask))
    x = Site("head_outputs")(gated(x, gate, "silu", policy))
    return layer.out_proj(JoinHeads(dtype=policy, name="joined_heads")(x))
