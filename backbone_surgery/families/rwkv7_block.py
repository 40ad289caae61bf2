"""The block of RWKV-7: a recurrence instead of attention, and an MLP; both see the token before."""

import keras
from keras import layers

from backbone_surgery.families.parts import JoinHeads, SplitHeads
from backbone_surgery.families.rwkv7_parts import (
    Bonus,
    ChannelDecay,
    HeadNorm,
    Interpolate,
    LowRankMap,
    Masked,
    RemovedKey,
    SquaredRelu,
    TokenMix,
    WrittenKey,
)
from backbone_surgery.opening.generalized_delta_rule import GeneralizedDeltaRule, TokenShift
from backbone_surgery.opening.recurrence import DECAY, WRITE_STRENGTH
from backbone_surgery.opening.site import Site


class _Mixer:
    """Mixes what stands at a token with what stood at the one before it; padding is zeros.

    Args:
        x: float[batch, time, hidden_dim].
        padding_mask: int[batch, time].
        policy: dtype policy of the block.
        name: of the layer that looks at the token before.
        both: whether padding is zeros of the token before, too, as KerasHub has it in attention.
    """

    def __init__(self, x, padding_mask, policy, name, both=False) -> None:
        self.x = Masked(dtype=policy, name=f"{name}_input")(x, padding_mask)
        self.previous, self.policy = TokenShift(dtype=policy, name=name)(x, padding_mask), policy
        if both:
            masked = Masked(dtype=policy, name=f"{name}_masked")
            self.previous = masked(self.previous, padding_mask)

    def __call__(self, name: str, share: keras.Variable):
        return TokenMix(share, dtype=self.policy, name=f"{name}_mix")(self.x, self.previous)


def _time_mix(layer, x, padding_mask, first_values, policy):
    """Spell out the recurrence, from its input to its output projection, and return its value."""
    mixed = _Mixer(x, padding_mask, policy, "attention_shift", both=True)

    def heads(name, x):
        return SplitHeads(layer.head_size, dtype=policy, name=f"{name}_heads")(x)

    def narrow(name, x, down, up, bias=None, activation=None):
        return LowRankMap(down, up, bias, activation, dtype=policy, name=f"{name}_map")(x)

    query = Site("query")(heads("query", layer.receptance(mixed("query", layer.x_r))))
    decay = narrow("decay", mixed("decay", layer.x_w), layer.w1, layer.w2, layer.w0, "tanh")
    decay = ChannelDecay(dtype=policy, name=DECAY)(heads("decay", decay))
    decay = Site(DECAY)(decay)
    key = Site("key")(heads("key", layer.key(mixed("key", layer.x_k))))

    for_value = mixed("value", layer.x_v)
    value = layer.value(for_value)
    if first_values and layer.add_v_first:
        gate = narrow("value_gate", for_value, layer.v1, layer.v2, layer.v0)
        gate = layers.Activation("sigmoid", dtype=policy, name="value_gate")(gate)
        gate = Site("value_gate")(gate)
        value = Interpolate(dtype=policy, name="mixed_value")(value, *first_values, gate)
    value = Site("value")(heads("value", value))

    strength = narrow("strength", mixed("strength", layer.x_a), layer.a1, layer.a2, layer.a0)
    strength = layers.Activation("sigmoid", dtype=policy, name=WRITE_STRENGTH)(strength)
    strength = Site(WRITE_STRENGTH)(heads("strength", strength))
    gate = narrow("gate", mixed("gate", layer.x_g), layer.g1, layer.g2, activation="sigmoid")
    gate = Site("output_gate")(heads("gate", gate))

    removed = RemovedKey(layer.k_k, dtype=policy, name="removed_key")(key)
    key = WrittenKey(layer.k_a, dtype=policy, name="written_key")(key, strength)
    rule = GeneralizedDeltaRule(dtype=policy, name="delta_rule")
    read = rule(query, key, value, decay, removed, strength, padding_mask)
    read = HeadNorm(layer.ln_x, dtype=policy, name="head_norm")(read)
    read = Bonus(layer.r_k, dtype=policy, name="bonus")(read, query, key, value)
    read = Site("head_outputs")(layers.Multiply(dtype=policy, name="gated_heads")([read, gate]))
    joined = JoinHeads(dtype=policy, name="joined_heads")(read)
    value = JoinHeads(dtype=policy, name="joined_value")(value)
    return Site("attention_output")(layer.output_layer(joined)), value


def _channel_mix(layer, x, padding_mask, policy):
    """Spell out the MLP."""
    mixed = _Mixer(x, padding_mask, policy, "mlp_shift")
    hidden = layer.key(mixed("hidden", layer.x_k))
    hidden = Site("mlp_hidden")(SquaredRelu(dtype=policy, name="squared_relu")(hidden))
    return Site("mlp_output")(layer.value(hidden))


def embed(block, hidden_states):
    """Normalize what the first block is given, which then is its residual stream."""
    return block.ln0(hidden_states) if block.use_initial_norm else hidden_states


def open_rwkv7_block(block, hidden_states, padding_mask, positions, v_first=(), lends=False):
    """Spell out one block. The first one lends its values, and the others mix them into theirs."""
    policy = block.dtype_policy
    v_first = v_first if isinstance(v_first, tuple) else (v_first,)  # what a user made of it
    normed = Site("attention_norm")(block.ln1(hidden_states))
    attended, value = _time_mix(block.att, normed, padding_mask, v_first, policy)
    x = layers.Add(dtype=policy, name="attention_residual")([attended, hidden_states])
    x = Site("residual_mid")(x)
    made = _channel_mix(block.ffn, Site("mlp_norm")(block.ln2(x)), padding_mask, policy)
    x = layers.Add(dtype=policy, name="mlp_residual")([x, made])
    return (x, value) if lends and not v_first else x
