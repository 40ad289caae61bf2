"""Linear attention: a causal convolution and the gated delta rule, with state instead of a cache.

Both are layers without weights of their own, run over whole rows or in pieces (see `state.py`).
What they keep of the tokens before has one size, however many these are.

Padding comes before the first token of a row, where the state is zero, or after the last token of a
run. It leaves the state as it is: its inputs count as zero, it writes nothing, and nothing decays.
"""

import functools

import keras
import numpy as np
from keras import ops

from backbone_surgery import target
from backbone_surgery.opening.state import StateSpec

DECAY, WRITE_STRENGTH = "decay", "write_strength"
"""Roles of the sites that count heads on their last axis, float[batch, time, heads]."""

_CHUNK, _CHUNK_ON_CPU = 64, 16
"""Tokens that one step of the delta rule takes."""
_SMALLEST = 1e-30
"""What a decay is at least, so that it has a logarithm."""


class CausalConvolution(keras.layers.Layer):
    """Convolve each channel over the latest tokens.

    Args:
        kernel: a weight that the block itself owns, float[channels, kernel_size].

    Call arguments:
        x: float[batch, time, channels].
        padding_mask: int or bool[batch, time], zero where a token is padding.

    Returns:
        float[batch, time, channels].
    """

    def __init__(self, kernel: keras.Variable, **kwargs) -> None:
        super().__init__(**kwargs)
        self.kernel = kernel

    def call(self, x, padding_mask):
        before = ops.zeros((ops.shape(x)[0], *self._before(x)), x.dtype)
        return self._convolve(x, padding_mask, before)[0]

    def compute_output_spec(self, x, padding_mask):
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def state_specs(self, x, padding_mask):
        return [StateSpec("inputs", (None, *self._before(x)), self.compute_dtype, head_axis=2)]

    def call_with_state(self, x, padding_mask, state):
        x, inputs = self._convolve(x, padding_mask, state["inputs"])
        return whole(x), {"inputs": inputs}

    def _before(self, x):
        """Return the shape of the inputs that the next token still sees, of one row."""
        channels, size = self.kernel.shape
        return size - 1, channels

    def _convolve(self, x, padding_mask, before):
        """Return the outputs, and the latest inputs."""
        time = ops.shape(x)[1]
        x = x * ops.cast(padding_mask, x.dtype)[..., None]
        inputs = ops.concatenate([before, x], axis=1)
        kernel = ops.cast(self.kernel, "float32")
        parts = [
            ops.cast(inputs[:, i : i + time], "float32") * kernel[:, i]
            for i in range(kernel.shape[1])
        ]
        return ops.cast(sum(parts), x.dtype), latest(inputs, padding_mask, len(parts) - 1)


class Memory(keras.layers.Layer):
    """A memory from keys to values, one for each head. All of it is computed in float32.

    Attributes:
        taken: how many arguments change it, the last ones of a call; key and value are the first.
    """

    taken: int

    def __init__(self, **kwargs) -> None:
        super().__init__(autocast=False, **kwargs)

    def before(self, key, value):
        """Return the state before the first token."""
        return ops.zeros((ops.shape(key)[0], *sizes_of(key, value)), "float32")

    def state_specs(self, *args):
        """Return the state: float32[batch, heads, key_dim, value_dim]."""
        key, value = args[-self.taken :][:2]
        return [StateSpec("state", (None, *sizes_of(key, value)), "float32", head_axis=1)]


class _DeltaRule(Memory):
    """What the gated delta rule and its two halves share."""

    taken = 5

    def query_heads(self, query, groups):
        """Return queries of length 1 / sqrt(key_dim), one for each value head."""
        return ops.repeat(_unit(whole(query)), groups, axis=2) * query.shape[-1] ** -0.5

    def steps(self, key, value, decay, write_strength, padding_mask):
        """Return for each token, by value head, its key, its value, log of its decay, strength."""
        is_token = ops.cast(padding_mask, "float32")[..., None]
        return (
            ops.repeat(_unit(whole(key)), value.shape[2] // key.shape[2], axis=2),
            ops.cast(whole(value), "float32"),
            log_of_decay(decay) * is_token,
            ops.cast(write_strength, "float32") * is_token,
        )


class DeltaRule(_DeltaRule):
    """The gated delta rule: a memory from keys to values, one for each head.

    Each token lets the memory S decay, and corrects what it gives for the token's key:
    S := decay · S, then S := S + strength · k (v - Sᵀ k)ᵀ. Then the memory is read: Sᵀ q. Keys have
    length one, queries 1 / sqrt(key_dim). Source: Yang et al. 2024, Gated Delta Networks,
    https://arxiv.org/abs/2412.06464.

    Many tokens are taken in one step, in which the corrections are the solution of a triangular
    system of equations.

    Call arguments:
        query: float[batch, time, key_heads, key_dim].
        key: likewise.
        value: float[batch, time, heads, value_dim]; `key_heads` divides `heads`.
        decay: float[batch, time, heads], the share of the memory that a token keeps; at least 0.
        write_strength: float[batch, time, heads], the share of the error that a token corrects.
        padding_mask: int or bool[batch, time], zero where a token is padding.

    Returns:
        What each token reads, float[batch, time, heads, value_dim], in the dtype of the values.
    """

    inner_site = "state"

    def inner_shape(self, query, key, value, decay, write_strength, padding_mask):
        return (*value.shape[:2], *sizes_of(key, value))

    def split_around(self, edit, query, *others):
        states = DeltaStates(dtype=self.dtype_policy, name=f"{self.name}_states")
        reading = DeltaReading(
            others[1].dtype, dtype=self.dtype_policy, name=f"{self.name}_reading"
        )
        return reading(query, edit(states(*others)))

    def call(self, query, key, value, decay, write_strength, padding_mask):
        steps = self.steps(key, value, decay, write_strength, padding_mask)
        return self._run(self.before(key, value), query, value, steps)[1]

    def compute_output_spec(self, query, key, value, decay, write_strength, padding_mask):
        return keras.KerasTensor(value.shape, value.dtype)

    def call_with_state(self, query, key, value, decay, write_strength, padding_mask, state):
        steps = self.steps(key, value, decay, write_strength, padding_mask)
        last, read = self._run(state["state"], query, value, steps)
        return read, {"state": last}

    def _run(self, state, query, value, steps):
        query = self.query_heads(query, value.shape[2] // query.shape[2])
        size = _CHUNK_ON_CPU if target.platform() == "cpu" else _CHUNK
        state, read = run_chunks(_step, state, (query, *steps), size)
        return state, ops.cast(read, value.dtype)


class DeltaStates(_DeltaRule):
    """First half of `DeltaRule`: the memory after each token.

    Returns float32[batch, time, heads, key_dim, value_dim].
    """

    def call(self, key, value, decay, write_strength, padding_mask):
        steps = self.steps(key, value, decay, write_strength, padding_mask)
        return states_of(_step, self.before(key, value), steps)[1]

    def compute_output_spec(self, key, value, decay, write_strength, padding_mask):
        return keras.KerasTensor((*value.shape[:2], *sizes_of(key, value)), "float32")

    def call_with_state(self, key, value, decay, write_strength, padding_mask, state):
        steps = self.steps(key, value, decay, write_strength, padding_mask)
        last, states = states_of(_step, state["state"], steps)
        return states, {"state": last}


class DeltaReading(_DeltaRule):
    """Second half of `DeltaRule`: what each token reads from the memory it is given.

    Args:
        output_dtype: of what is read.
    """

    def __init__(self, output_dtype: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.output_dtype = output_dtype

    def call(self, query, states):
        query = self.query_heads(query, states.shape[2] // query.shape[2])
        read = ops.matmul(query[..., None, :], ops.cast(states, "float32"))
        return ops.cast(read[..., 0, :], self.output_dtype)

    def compute_output_spec(self, query, states):
        return keras.KerasTensor((*states.shape[:3], states.shape[4]), self.output_dtype)


def latest(inputs, padding_mask, kept):
    """Return the inputs that the next token still sees.

    Args:
        inputs: float[batch, kept + time, channels], those before this run first.
        padding_mask: int or bool[batch, time].
        kept: how many to return, up to the last token that is no padding.
    """
    is_token = ops.cast(padding_mask, "int32")
    time = padding_mask.shape[1]
    if time == 1:
        return ops.where(is_token[..., None] > 0, inputs[:, 1:], inputs[:, :-1])
    last = ops.max(is_token * (ops.arange(time, dtype="int32") + 1), axis=1)
    index = last[:, None] + ops.arange(kept, dtype="int32")
    return ops.take_along_axis(inputs, index[..., None], axis=1)


def log_of_decay(decay):
    """Return the logarithm of decays, in float32."""
    return ops.log(ops.maximum(ops.cast(decay, "float32"), _SMALLEST))


def whole(x):
    """Have what is made for all heads side by side on every device of a mesh; inside a program.

    Queries, keys and values are of different sizes, so even parts of such channels are no heads.
    Out of whole ones each device takes its own heads, and nothing more is exchanged.
    """
    placement = target.placement()
    return x if placement is None else placement.pin_rows(x)


def sizes_of(key, value):
    """Return the shape of the memory of one row."""
    return value.shape[2], key.shape[3], value.shape[3]


def _unit(x):
    """Scale heads to length one, in float32."""
    x = ops.cast(x, "float32")
    return x * ops.rsqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)


def run_chunks(step, state, arrays, size):
    """Run the tokens of a text, some in one step.

    Args:
        step: `(state, *arrays) -> (state, read)`, of arrays float[batch, heads, tokens, ...].
        state: the memory before, float32[batch, heads, key_dim, value_dim].
        arrays: what the tokens have, each float[batch, time, heads, ...].
        size: how many tokens are run in one step at most.

    Returns:
        The memory after the last token, and what each has read, float[batch, time, heads, ...].
    """
    time = arrays[0].shape[1]
    count = -(-time // size)
    chunks = [_cut(x, count) for x in arrays]
    if count == 1:
        state, read = step(state, *(x[0] for x in chunks))
        read = read[None]
    else:
        state, read = ops.scan(_unpacking(step), state, tuple(chunks))
    return state, _join(read, time)


def states_of(step, state, arrays):
    """Run one token after the other, and keep the memory after each; see `run_chunks`.

    Args:
        step: see there.
        state: likewise.
        arrays: likewise, without the queries.

    Returns:
        The memory after the last token, and after each, float32[batch, time, ...].
    """

    def one(state, xs):
        key, *others = (x[:, :, None] for x in xs)
        state, _ = step(state, key, key, *others)
        return state, state

    state, states = ops.scan(one, state, tuple(ops.moveaxis(x, 1, 0) for x in arrays))
    return state, ops.moveaxis(states, 0, 1)


@functools.cache
def _unpacking(step):
    """Return a step for `ops.scan`: always the same, so that JAX compiles it once for all calls."""
    return lambda state, xs: step(state, *xs)


def inverse_of(below):
    """Return the inverse of I - A, of matrices A that are zero but below their diagonals.

    From the inverses of blocks on the diagonal those of blocks twice as large are made, by products
    alone. On a CPU, solvers of small systems of equations wait long where other work runs.

    Args:
        below: A, float32[..., size, size].
    """
    index = np.arange(below.shape[-1])
    inverse = np.eye(len(index), dtype="float32")
    for half in (2**i for i in range((len(index) - 1).bit_length())):
        block, is_second = index // (2 * half), index // half % 2 == 1
        joins = (block[:, None] == block) & is_second[:, None] & ~is_second
        part = below * joins.astype("float32")
        inverse = inverse + (ops.matmul(inverse, ops.matmul(part, inverse)) if half > 1 else part)
    return inverse


def _cut(x, count):
    """Cut [batch, time, heads, ...] into [count, batch, heads, chunk, ...], with zeros at the end.

    Zeros leave the memory as it is: a decay of one, by its logarithm, and no strength.
    """
    batch, time, *rest = ops.shape(x)
    size = -(-time // count)
    x = ops.pad(x, [(0, 0), (0, count * size - time), *[(0, 0)] * len(rest)])
    x = ops.reshape(x, (batch, count, size, *rest))
    return ops.transpose(x, (1, 0, 3, 2, *range(4, len(x.shape))))


def _join(x, time):
    """Undo `_cut`."""
    count, batch, heads, size, *rest = ops.shape(x)
    x = ops.transpose(x, (1, 0, 3, 2, *range(4, len(x.shape))))
    return ops.reshape(x, (batch, count * size, heads, *rest))[:, :time]


def _step(state, query, key, value, log_decay, strength):
    """Run one chunk of tokens: the memory after them, and what each of them reads.

    With S the memory before the chunk, and `kept[i, j]` what token i keeps of what token j wrote,
    the memory after token i is Sᵢ = kept[i] · S + Σⱼ kept[i, j] · kⱼ cⱼᵀ, over all j up to i. Each
    correction depends on those before: cᵢ = strengthᵢ · (vᵢ - kept[i] · Sᵀ kᵢ - Σⱼ kept[i, j] ·
    (kᵢ · kⱼ) cⱼ), over all j before i.

    Args:
        state: S, float32[batch, heads, key_dim, value_dim].
        query: float32[batch, heads, chunk, key_dim].
        key: likewise.
        value: float32[batch, heads, chunk, value_dim].
        log_decay: float32[batch, heads, chunk].
        strength: likewise.
    """
    size = key.shape[2]
    before = np.tril(np.ones((size, size), "float32"), -1)
    # Sums of the very decays between two tokens: differences of sums from the start would round.
    between = ops.cumsum(log_decay[..., None] * before, axis=-2)
    kept_of = ops.exp(between) * (before + np.eye(size, dtype="float32"))
    kept = ops.exp(ops.cumsum(log_decay, axis=-1))[..., None]
    strength = strength[..., None]

    both = ops.concatenate([key, query], axis=2)
    key_reads, query_reads = ops.split(ops.matmul(both, state), 2, axis=2)
    products = ops.matmul(both, ops.swapaxes(key, -1, -2))
    key_products, query_products = ops.split(products, 2, axis=2)
    change = strength * (value - kept * key_reads)
    if size > 1:
        system = strength * key_products * kept_of * before
        if target.platform() == "cpu":
            change = ops.matmul(inverse_of(-system), change)
        else:
            system = system + np.eye(size, dtype="float32")
            change = ops.solve_triangular(system, change, lower=True)
    read = kept * query_reads + ops.matmul(query_products * kept_of, change)
    written = ops.matmul(ops.swapaxes(key * kept_of[..., -1, :, None], -1, -2), change)
    return kept[..., -1:, :] * state + written, read
