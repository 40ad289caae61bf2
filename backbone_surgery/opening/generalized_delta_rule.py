"""RWKV-7's recurrence: the delta rule with a decay for each channel, and a shift by one token.

Like those of `recurrence.py` these are layers without weights, run over whole rows or in pieces,
and padding leaves their state as it is.
"""

import keras
import numpy as np
from keras import ops

from backbone_surgery import target
from backbone_surgery.opening.recurrence import (
    Memory,
    inverse_of,
    latest,
    log_of_decay,
    run_chunks,
    sizes_of,
    states_of,
)
from backbone_surgery.opening.state import StateSpec

_CHUNK, _CHUNK_ON_CPU = 16, 64
"""Tokens that one step of the rule takes: what each keeps of each other one has all channels.

On a CPU they run one after the other, which is many times as fast there. For gradients a chunk is
run again, so that only the memories between chunks are kept.
"""


class TokenShift(keras.layers.Layer):
    """Give each token what stands at the one before it; zeros at the first one, and for padding.

    Call arguments:
        x: float[batch, time, channels].
        padding_mask: int or bool[batch, time], zero where a token is padding.

    Returns:
        float[batch, time, channels].
    """

    def call(self, x, padding_mask):
        return self._shift(x, padding_mask, ops.zeros_like(x[:, :1]))[0]

    def compute_output_spec(self, x, padding_mask):
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def state_specs(self, x, padding_mask):
        return [StateSpec("inputs", (None, 1, x.shape[-1]), self.compute_dtype)]

    def call_with_state(self, x, padding_mask, state):
        x, inputs = self._shift(x, padding_mask, state["inputs"])
        return x, {"inputs": inputs}

    def _shift(self, x, padding_mask, before):
        x = x * ops.cast(padding_mask, x.dtype)[..., None]
        inputs = ops.concatenate([before, x], axis=1)
        return inputs[:, :-1], latest(inputs, padding_mask, 1)


class _GeneralizedDeltaRule(Memory):
    """What the rule and its first half share."""

    taken = 6

    def steps(self, key, value, decay, removed_key, write_strength, padding_mask):
        """Return for each token, in float32, its key, its value, and so on; see `_step`."""
        is_token = ops.cast(padding_mask, "float32")[..., None, None]
        removed = ops.cast(removed_key, "float32") * is_token
        return (
            ops.cast(key, "float32") * is_token,
            ops.cast(value, "float32"),
            log_of_decay(decay) * is_token,
            -removed,
            removed * ops.cast(write_strength, "float32"),
        )


class GeneralizedDeltaRule(_GeneralizedDeltaRule):
    """A memory from keys to values, one for each head, of which each channel decays by itself.

    Each token lets the channels of the memory S decay, takes out of it what it gave for a key, in
    part, and writes its value: S := decay · S - (strength · r) (Sᵀ r)ᵀ + k vᵀ, with S before the
    decay in Sᵀ r. Then the memory is read: Sᵀ q. Source: Peng et al. 2025, RWKV-7 "Goose",
    https://arxiv.org/abs/2503.14456, with S transposed.

    Many tokens are taken in one step, in which what they take out is the solution of a triangular
    system of equations.

    Call arguments:
        query: float[batch, time, heads, key_dim].
        key: likewise, k.
        value: float[batch, time, heads, value_dim].
        decay: float[batch, time, heads, key_dim], the share of each channel that a token keeps; at
            least 0.
        removed_key: likewise, r, of length one.
        write_strength: likewise, the share of what it gave that a token takes out.
        padding_mask: int or bool[batch, time], zero where a token is padding.

    Returns:
        What each token reads, float[batch, time, heads, value_dim], in the dtype of the values.
    """

    inner_site = "state"

    def inner_shape(self, query, key, value, *others):
        return (*value.shape[:2], *sizes_of(key, value))

    def split_around(self, edit, query, *others):
        states = MemoryStates(dtype=self.dtype_policy, name=f"{self.name}_states")
        reading = MemoryReading(
            others[1].dtype, dtype=self.dtype_policy, name=f"{self.name}_reading"
        )
        return reading(query, edit(states(*others)))

    def call(self, query, key, value, decay, removed_key, write_strength, padding_mask):
        steps = self.steps(key, value, decay, removed_key, write_strength, padding_mask)
        return self._run(self.before(key, value), query, value, steps)[1]

    def compute_output_spec(self, query, key, value, *others):
        return keras.KerasTensor(value.shape, value.dtype)

    def call_with_state(
        self, query, key, value, decay, removed_key, write_strength, padding_mask, state
    ):
        steps = self.steps(key, value, decay, removed_key, write_strength, padding_mask)
        last, read = self._run(state["state"], query, value, steps)
        return read, {"state": last}

    def _run(self, state, query, value, steps):
        arrays = ops.cast(query, "float32"), *steps
        one_by_one = keras.config.backend() == "jax" and target.platform() == "cpu"
        step, size = (_BY_TOKEN, _CHUNK_ON_CPU) if one_by_one else (_step, _CHUNK)
        state, read = run_chunks(step, state, arrays, size)
        return state, ops.cast(read, value.dtype)


class MemoryStates(_GeneralizedDeltaRule):
    """First half of `GeneralizedDeltaRule`: the memory after each token.

    Returns float32[batch, time, heads, key_dim, value_dim].
    """

    def call(self, key, value, decay, removed_key, write_strength, padding_mask):
        steps = self.steps(key, value, decay, removed_key, write_strength, padding_mask)
        return states_of(_step, self.before(key, value), steps)[1]

    def compute_output_spec(self, key, value, *others):
        return keras.KerasTensor((*value.shape[:2], *sizes_of(key, value)), "float32")

    def call_with_state(self, key, value, decay, removed_key, write_strength, padding_mask, state):
        steps = self.steps(key, value, decay, removed_key, write_strength, padding_mask)
        last, states = states_of(_step, state["state"], steps)
        return states, {"state": last}


class MemoryReading(keras.layers.Layer):
    """Second half of `GeneralizedDeltaRule`: what each token reads from the memory it is given.

    Args:
        output_dtype: of what is read.
    """

    def __init__(self, output_dtype: str, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)
        self.output_dtype = output_dtype

    def call(self, query, states):
        query, states = ops.cast(query, "float32"), ops.cast(states, "float32")
        return ops.cast(ops.matmul(query[..., None, :], states)[..., 0, :], self.output_dtype)

    def compute_output_spec(self, query, states):
        return keras.KerasTensor((*states.shape[:3], states.shape[4]), self.output_dtype)


def _step(state, query, key, value, log_decay, read_key, removed_key):
    """Run one chunk of tokens: the memory after them, and what each of them reads.

    With S the memory before the chunk, and `kept[i, j]` what channels keep up to token i of what
    token j wrote, the memory after token i is Sᵢ = kept[i] · S + Σⱼ kept[i, j] · (bⱼ uⱼᵀ + kⱼ vⱼᵀ),
    over all j up to i. What token i takes out depends on those before: uᵢ = Sᵢ₋₁ᵀ aᵢ.

    Args:
        state: S, float32[batch, heads, key_dim, value_dim].
        query: float32[batch, heads, chunk, key_dim].
        key: likewise, k.
        value: float32[batch, heads, chunk, value_dim].
        log_decay: float32[batch, heads, chunk, key_dim].
        read_key: likewise, a.
        removed_key: likewise, b.
    """
    if key.shape[2] == 1:
        return _one(state, query, key, value, ops.exp(log_decay), read_key, removed_key)
    # kept_before[i, j] is up to token i - 1: the decay of token i itself is left out.
    kept, kept_before = _kept(log_decay)
    both = ops.stack([removed_key, key], axis=2)[:, :, :, None]
    taken_of, written_of = ops.unstack(
        ops.sum((read_key[:, :, None, :, None] * kept_before[:, :, None]) * both, axis=-1), axis=2
    )
    so_far = ops.cumsum(log_decay, axis=2)
    cumulative, before = ops.exp(so_far), ops.exp(_one_later(so_far))
    asked = ops.concatenate([read_key * before, query * cumulative], axis=2)
    key_reads, query_reads = ops.split(ops.matmul(asked, state), 2, axis=2)
    out = ops.matmul(inverse_of(taken_of), key_reads + ops.matmul(written_of, value))
    products = ops.sum((query[:, :, None, :, None] * kept[:, :, None]) * both, axis=-1)
    read = ops.matmul(products[:, :, 0], out) + ops.matmul(products[:, :, 1], value)
    last = kept[:, :, -1]
    written = ops.matmul(ops.swapaxes(removed_key * last, -1, -2), out)
    written = written + ops.matmul(ops.swapaxes(key * last, -1, -2), value)
    return cumulative[..., -1, :, None] * state + written, query_reads + read


def _run_by_token(state, *arrays):
    """Run `_one` for one token after the other, and return as `_step` does."""

    def one(state, token):
        query, key, value, log_decay, *keys = (x[:, :, None] for x in token)
        return _one(state, query, key, value, ops.exp(log_decay), *keys)

    state, read = ops.scan(one, state, tuple(ops.moveaxis(x, 2, 0) for x in arrays))
    return state, ops.moveaxis(read[:, :, :, 0], 0, 2)


_BY_TOKEN = keras.remat(_run_by_token)


def _one(state, query, key, value, decay, read_key, removed_key):
    """Run one token; see `_step`. What is written is no product of matrices: it takes no memory."""
    asked = ops.concatenate([read_key, query * decay], axis=2)
    out, read = ops.split(ops.matmul(asked, state), 2, axis=2)
    read = read + ops.sum(query * removed_key, axis=-1, keepdims=True) * out
    read = read + ops.sum(query * key, axis=-1, keepdims=True) * value
    decay, removed_key, key = (ops.swapaxes(x, -1, -2) for x in (decay, removed_key, key))
    return decay * state + removed_key * out + key * value, read


def _kept(log_decay):
    """Return what channels keep of each token j up to token i, and up to the one before i."""
    size = log_decay.shape[2]
    after = np.tril(np.ones((size, size), "float32"), -1)[..., None]
    # Sums of the very decays between two tokens: differences of sums from the start would round.
    between = ops.cumsum(log_decay[:, :, :, None] * after, axis=2)
    kept = ops.exp(between) * (after + np.eye(size, dtype="float32")[..., None])
    return kept, ops.exp(_one_later(between)) * after


def _one_later(x):
    """Give each token what the one before it has, and zeros to the first: axis 2 counts them."""
    padded = ops.pad(x, [(int(i == 2), 0) for i in range(len(x.shape))])
    return padded[:, :, :-1]
