"""Self-attention as a weightless layer, over whole rows or over a cache, whole or in two halves.

`SelfAttention` carries everything that attention needs to know (heads, key/value heads, head size,
scale, soft cap, window, slopes, sinks). Its state (see `state.py`) is the keys and values of the
tokens before.

Where a rewrite touches the attention pattern itself, the layer is split into the two halves
`AttentionPattern` and `AttentionMix`: the first keeps the keys, the second the values. All are
plain `keras.ops`, so that surgery and gradients work on every Keras backend.
"""

from typing import Any

import keras
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.errors import SurgeryError
from backbone_surgery.kernels import calls, gpu_attention
from backbone_surgery.opening.one_query import adds_up, mix_of_one, scores_of_one, share_out
from backbone_surgery.opening.state import StateSpec, write_slots


class _Attention(keras.layers.Layer):
    """What the attention layers share: their settings, and the two halves of the computation.

    Args:
        num_heads: see `SelfAttention`, as for all that follow.
        num_key_value_heads: see there.
        head_dim: see there.
        scale: see there.
        logit_soft_cap: see there.
        sliding_window_size: see there.
        alibi_slopes: see there.
        sinks: see there.
        keeps_state: see there.
        dropout: see there.
    """

    __new__ = graph.new_layer

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        scale: float,
        logit_soft_cap: float | None = None,
        sliding_window_size: int | None = None,
        alibi_slopes: tuple[float, ...] | None = None,
        sinks: keras.layers.Layer | None = None,
        keeps_state: bool = True,
        dropout: keras.layers.Dropout | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.scale = scale
        self.logit_soft_cap = logit_soft_cap
        self.sliding_window_size = sliding_window_size
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.keeps_state = keeps_state
        self.dropout = dropout

    def settings(self) -> dict[str, Any]:
        """Return what another attention layer needs to compute the same."""
        names = (
            "num_heads",
            "num_key_value_heads",
            "head_dim",
            "scale",
            "logit_soft_cap",
            "sliding_window_size",
            "alibi_slopes",
            "sinks",
            "keeps_state",
        )
        return {name: getattr(self, name) for name in names}

    def uncached_mask(self, query, padding_mask):
        """Return the mask among the tokens of one pass, and how far back each key lies.

        They are bool[batch, queries, keys] and int32[queries, keys].
        """
        slots = ops.arange(ops.shape(query)[1], dtype="int32")
        return self._mask(slots, slots, padding_mask)

    def cached_mask(self, query, cache_update_index, cache_mask):
        """Return the mask of new tokens over a cache, and how far back each key lies."""
        queries = ops.arange(ops.shape(query)[1], dtype="int32")
        queries = queries + ops.cast(cache_update_index, "int32")
        keys = ops.arange(ops.shape(cache_mask)[1], dtype="int32")
        return self._mask(queries, keys, cache_mask)

    def _mask(self, query_slots, key_slots, is_token):
        distance = query_slots[:, None] - key_slots[None, :]
        mask = distance >= 0
        if self.sliding_window_size is not None:
            mask = ops.logical_and(mask, distance < self.sliding_window_size)
        is_token = ops.cast(is_token, "bool")[:, None, :]
        return ops.logical_and(mask[None], is_token), distance

    def seen(self, query, cache_update_index):
        """Return the first slot of a cache that new tokens see, and the one after the last."""
        stop = cache_update_index + ops.shape(query)[1]
        window = self.sliding_window_size
        return 0 if window is None else cache_update_index - window + 1, stop

    def pattern(self, query, key, mask, distance, seen=None, cut=None):
        """Return the attention pattern, float[batch, num_heads, queries, keys].

        Of a cache, `seen` tells which slots queries see, so that no others need be read. What
        `cut`, bool[batch, num_heads, queries, keys], names has no part in the softmax.
        """
        scores = self._scores(query, key, seen)
        dtype = scores.dtype
        mask = mask[:, None, None]
        if cut is not None:
            mask = ops.logical_and(mask, ops.logical_not(ops.reshape(cut, ops.shape(scores))))
        if self.alibi_slopes is not None:
            scores = scores - self._by_head(self.alibi_slopes) * ops.cast(distance, "float32")
        pattern = self._softmax(scores, mask)
        batch, _, _, time, length = ops.shape(scores)
        return ops.reshape(ops.cast(pattern, dtype), (batch, self.num_heads, time, length))

    def _scores(self, query, key, seen):
        """Return what goes into the softmax, float[batch, key heads, groups, queries, keys]."""
        query = query * ops.cast(self.scale, query.dtype)
        batch, time, _, _ = ops.shape(query)
        heads = (self.num_key_value_heads, self.num_heads // self.num_key_value_heads)
        query = ops.reshape(query, (batch, time, *heads, self.head_dim))
        if adds_up(time):
            return self._capped(scores_of_one(query, key))
        query = ops.transpose(query, (0, 2, 3, 1, 4))
        query = ops.reshape(query, (batch, heads[0], heads[1] * time, self.head_dim))
        if seen is not None and calls.attends(query, key):
            scores = calls.scores(query, key, *seen)
            return self._capped(ops.reshape(scores, (batch, *heads, time, ops.shape(key)[1])))
        key = ops.transpose(key, (0, 2, 1, 3))
        if isinstance(time, int) and time == 1:
            # With the keys on the left, XLA on a CPU copies them head by head, and turns none.
            scores = ops.matmul(key, ops.transpose(query, (0, 1, 3, 2)))
            scores = ops.transpose(scores, (0, 1, 3, 2))
        else:
            scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2)))
        length = ops.shape(key)[2]
        return self._capped(ops.reshape(scores, (batch, *heads, time, length)))

    def _capped(self, scores):
        if self.logit_soft_cap is None:
            return scores
        return ops.tanh(scores / self.logit_soft_cap) * self.logit_soft_cap

    def _softmax(self, scores, mask):
        scores = ops.where(mask, ops.cast(scores, "float32"), -1e30)
        if self.sinks is None:
            return ops.where(mask, ops.softmax(scores, axis=-1), 0.0)
        sinks = self._by_head(self.sinks.sinks)
        highest = ops.maximum(ops.max(scores, axis=-1, keepdims=True), sinks)
        shares = ops.where(mask, ops.exp(scores - highest), 0.0)
        return shares / (ops.sum(shares, axis=-1, keepdims=True) + ops.exp(sinks - highest))

    def _by_head(self, numbers):
        """Give a number for each head the dimensions of scores."""
        numbers = ops.cast(ops.convert_to_tensor(numbers), "float32")
        groups = self.num_heads // self.num_key_value_heads
        return ops.reshape(numbers, (self.num_key_value_heads, groups, 1, 1))

    def mix(self, pattern, value, seen=None):
        """Mix the values by a pattern, to float[batch, queries, num_heads, head_dim]."""
        batch, _, time, length = ops.shape(pattern)
        groups = self.num_heads // self.num_key_value_heads
        if adds_up(time):
            shares = ops.reshape(pattern, (batch, self.num_key_value_heads, groups, length))
            mixed = mix_of_one(shares, value)
            return ops.reshape(mixed, (batch, time, self.num_heads, self.head_dim))
        pattern = ops.reshape(pattern, (batch, self.num_key_value_heads, groups * time, length))
        if seen is not None and calls.attends(pattern, value):
            mixed = calls.mix(pattern, value, *seen)
        else:
            mixed = ops.matmul(pattern, ops.transpose(value, (0, 2, 1, 3)))
        mixed = ops.reshape(mixed, (batch, self.num_heads, time, self.head_dim))
        return ops.transpose(mixed, (0, 2, 1, 3))

    def attend(self, query, key, value, mask, distance, seen):
        """Return what `mix` gives of `pattern`, by the fused op of Keras where that is for it.

        Keras chooses cuDNN's flash attention where the shapes allow it.
        """
        if self._is_fused(query):
            # All in one dtype, as cuDNN wants them.
            key, value = (ops.cast(x, query.dtype) for x in (key, value))
            return ops.dot_product_attention(
                query,
                key,
                value,
                mask=mask[:, None],
                scale=self.scale,
                flash_attention=False if target.is_planned() else None,
            )
        pieces = target.pieces_of_prompt(ops.shape(query)[1])
        if len(pieces) == 1:
            return self.mix(self.pattern(query, key, mask, distance, seen), value, seen)
        mixed = [self._attend_before(*x, query, key, value, mask, distance) for x in pieces]
        return ops.concatenate(mixed, axis=1)

    def _attend_one(self, query, key, value, state, cache_update_index, cache_mask):
        """Compute what `call_with_state` does of one query, by a kernel for a GPU."""
        mask, _ = self.cached_mask(query, cache_update_index, cache_mask)
        first, _ = self.seen(query, cache_update_index)
        slopes, sinks = self.alibi_slopes, self.sinks and self.sinks.sinks
        shape = (self.num_key_value_heads, self.num_heads // self.num_key_value_heads)
        of_heads = [
            None if x is None else ops.reshape(ops.convert_to_tensor(x), shape)
            for x in (slopes, sinks)
        ]
        heads = [query * ops.cast(self.scale, query.dtype)]
        kept = key, value
        if self.keeps_state:
            heads += [key, value]
            kept = state["key"], state["value"]
        mixed, keys, values = share_out(
            self._run_kernel, heads, kept, mask[:, 0], (first, cache_update_index), of_heads
        )
        return mixed[:, None], {"key": keys, "value": values} if self.keeps_state else state

    def _run_kernel(self, heads, kept, mask, ends, of_heads):
        """Attend with some heads, [batch, 1, heads, size], to some of what is kept."""
        return gpu_attention.attend_one(
            ops.concatenate(heads, axis=2)[:, 0],
            *kept,
            gpu_attention.Seen(mask, *ends),
            gpu_attention.Scoring(self.logit_soft_cap, *of_heads),
            heads[0].shape[2],
        )

    def _is_fused(self, query):
        """Tell whether to: on a GPU, in half precision, without a soft cap, slopes and sinks."""
        half = keras.backend.standardize_dtype(query.dtype) in ("bfloat16", "float16")
        others = (self.logit_soft_cap, self.alibi_slopes, self.sinks)
        if target.platform() != "gpu" or not half or any(x is not None for x in others):
            return False
        return not adds_up(ops.shape(query)[1])

    def _attend_before(self, start, stop, query, key, value, mask, distance):
        """Let some queries attend to the keys up to the last of them, within their window."""
        first = max(start - (self.sliding_window_size or stop) + 1, 0)
        of, to = slice(start, stop), slice(first, stop)
        pattern = self.pattern(query[:, of], key[:, to], mask[:, of, to], distance[of, to])
        return self.mix(pattern, value[:, to])

    def specs(self, **heads):
        """Return the specs of what the layer itself keeps, from names and tensors of heads."""
        return [_slots(name, x) for name, x in heads.items()] if self.keeps_state else []

    def keep(self, state, cache_update_index, **heads):
        """Write the heads of new tokens into the state: those of all tokens, and the new state."""
        if not self.keeps_state:
            return list(heads.values()), state
        state = {k: write_slots(state[k], cache_update_index, x) for k, x in heads.items()}
        return list(state.values()), state

    def drop(self, pattern, training):
        """Apply the block's own dropout to a pattern."""
        return pattern if self.dropout is None else self.dropout(pattern, training=training)


def _slots(name: str, heads: keras.KerasTensor) -> StateSpec:
    """Return the spec of an array that keeps one head or more for each token."""
    shape = (None, None, *heads.shape[2:])
    return StateSpec(name, shape, heads.dtype, slot_axis=1, head_axis=2)


class SelfAttention(_Attention):
    """Causal self-attention over queries, keys and values that were projected before.

    It is called on:

    * `query` float[batch, time, num_heads, head_dim],
    * `key` and `value` float[batch, time, num_key_value_heads, head_dim],
    * `padding_mask` int or bool[batch, time], zero where a token is padding,

    and returns the mix of values for each head, float[batch, time, num_heads, head_dim]: zeros for
    a token that sees nothing.

    Args:
        num_heads: number of query heads.
        num_key_value_heads: number of key/value heads; divides `num_heads`.
        head_dim: size of one head.
        scale: float, what query-key products are multiplied by.
        logit_soft_cap: float or `None`; products become `cap * tanh(products / cap)`.
        sliding_window_size: int or `None`; how many latest tokens a token can see, itself
            included.
        alibi_slopes: `num_heads` floats or `None`; how much a score falls for each token that the
            key lies back (ALiBi, https://arxiv.org/abs/2108.12409).
        sinks: the layer that owns `sinks`, float[num_heads], or `None`. A sink is one more score
            in each softmax, of no key, so that the rows of a pattern sum to less than one
            (https://arxiv.org/abs/2309.17453).
        keeps_state: whether the layer keeps its keys and values itself. Else it is given those of
            all tokens, by a `SharedKeysAndValues`.
        dropout: a `keras.layers.Dropout` of the block this was opened from, or `None`. It is
            shared, so that training behaves as upstream.

    Raises:
        SurgeryError: when it is called on tensors of other sizes.

    Examples:
        >>> import backbone_surgery as bs, numpy as np
        >>> attention = bs.SelfAttention(4, 2, head_dim=8, scale=8**-0.5)
        >>> query, key = np.ones((1, 3, 4, 8)), np.ones((1, 3, 2, 8))
        >>> attention(query, key, key, np.ones((1, 3))).shape
        (1, 3, 4, 8)
    """

    inner_site = "attention_pattern"

    def inner_shape(self, query, key, value, padding_mask):
        batch, time, heads, _ = query.shape
        return batch, heads, time, key.shape[1]

    def split_around(self, edit, query, key, value, padding_mask):
        settings, policy = self.settings(), self.dtype_policy
        pattern = AttentionPattern(
            **settings, dropout=self.dropout, dtype=policy, name=f"{self.name}_pattern"
        )
        mix = AttentionMix(**settings, dtype=policy, name=f"{self.name}_mix")
        return mix(edit(pattern(query, key, padding_mask)), value)

    def call(self, query, key, value, padding_mask, training=None):
        pattern = self.pattern(query, key, *self.uncached_mask(query, padding_mask))
        return self.mix(self.drop(pattern, training), value)

    def compute_output_spec(self, query, key, value, padding_mask, training=None):
        counts = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        wanted = [(count, self.head_dim) for count in counts]
        received = [tuple(x.shape[2:]) for x in (query, key, value)]
        if received != wanted or self.num_heads % self.num_key_value_heads:
            raise SurgeryError(
                f"SelfAttention at '{self.name}': expected queries, keys and values of [heads, "
                f"size] {wanted}, by its num_heads, num_key_value_heads, which divides that, and "
                f"head_dim. Received {received}. Pass the numbers of the block."
            )
        return keras.KerasTensor(query.shape, query.dtype)

    def state_specs(self, query, key, value, padding_mask):
        return self.specs(key=key, value=value)

    def call_with_state(self, query, key, value, state, cache_update_index, cache_mask):
        if gpu_attention.takes(query, state["key"] if self.keeps_state else key):
            return self._attend_one(query, key, value, state, cache_update_index, cache_mask)
        (key, value), state = self.keep(state, cache_update_index, key=key, value=value)
        masks = self.cached_mask(query, cache_update_index, cache_mask)
        seen = self.seen(query, cache_update_index)
        return self.attend(query, key, value, *masks, seen), state


class AttentionPattern(_Attention):
    """First half of `SelfAttention`: float[batch, num_heads, queries, keys], rows sum to one.

    With sinks, rows sum to less. Edges that `cut` names, bool of that shape, are left out.
    """

    def call(self, query, key, padding_mask, cut=None, training=None):
        masks = self.uncached_mask(query, padding_mask)
        return self.drop(self.pattern(query, key, *masks, cut=cut), training)

    def compute_output_spec(self, query, key, padding_mask, cut=None, training=None):
        batch, time, heads, _ = query.shape
        return keras.KerasTensor((batch, heads, time, key.shape[1]), query.dtype)

    def state_specs(self, query, key, padding_mask, cut=None):
        return self.specs(key=key)

    def call_with_state(self, query, key, state, cache_update_index, cache_mask, cut=None):
        (key,), state = self.keep(state, cache_update_index, key=key)
        masks = self.cached_mask(query, cache_update_index, cache_mask)
        seen = self.seen(query, cache_update_index)
        return self.pattern(query, key, *masks, seen, cut), state


class AttentionMix(_Attention):
    """Second half of `SelfAttention`: the values mixed by a pattern."""

    def call(self, pattern, value):
        return self.mix(pattern, value)

    def compute_output_spec(self, pattern, value):
        batch, heads, time, _ = pattern.shape
        return keras.KerasTensor((batch, time, heads, self.head_dim), value.dtype)

    def state_specs(self, pattern, value):
        return self.specs(value=value)

    def call_with_state(self, pattern, value, state, cache_update_index):
        (value,), state = self.keep(state, cache_update_index, value=value)
        return self.mix(pattern, value), state  # all of it: a rewrite may have changed the pattern


class SharedKeysAndValues(keras.layers.Layer):
    """Keep keys and values for several attention layers, and give them those of all tokens.

    Args:
        num_heads: number of query heads of these layers.

    It is called on `key` and `value`, float[batch, time, num_key_value_heads, head_dim], and
    returns both. Run with its state it returns those of the tokens before too. What attends to them
    is a `SelfAttention` with `keeps_state=False`.
    """

    def __init__(self, num_heads: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(self, key, value):
        return key, value

    def compute_output_spec(self, key, value):
        return tuple(keras.KerasTensor(x.shape, x.dtype) for x in (key, value))

    def state_specs(self, key, value):
        return _slots("key", key), _slots("value", value)

    def call_with_state(self, key, value, state, cache_update_index):
        key = write_slots(state["key"], cache_update_index, key)
        value = write_slots(state["value"], cache_update_index, value)
        return (key, value), {"key": key, "value": value}
