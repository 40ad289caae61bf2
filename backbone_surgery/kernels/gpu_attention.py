"""Attention of one query to a cache as one kernel for a GPU, which reads the slots that are seen.

XLA writes the new key and value in two, attends in three, and reads all slots. The slots are shared
out among several programs, and what these find is put together by the logarithms of their sums, as
in Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from backbone_surgery import target
from backbone_surgery.kernels import gpu
from backbone_surgery.kernels.calls import added_up

_LEAST_SIZE = 16
"""Of each axis of a product of Triton: queries that share a key are filled up to as many."""

_NUMBERS = 64 * 128
"""Of keys, and of values, that a program reads at once."""

_PROGRAMS, _MOST_PARTS, _LEAST_BLOCKS = 512, 8, 2
"""Programs that keep a GPU busy; parts of the slots of a head, and blocks of a part: what is shared
out has to be put together by another kernel."""

_MOST_MIXED = 2**14
"""Numbers of what the queries that share a key mix, and of their scores of a block: of both a
program keeps all, in float32. For more, the shared memory of a GPU is too small."""

_UNSEEN = -1e30


class Seen(NamedTuple):
    """What a query sees of a cache.

    Attributes:
        mask: bool[batch, slots], the slots that are seen.
        first: int[], before which no slot is.
        slot: int[], that of the query, after which none is.
    """

    mask: Any
    first: Any
    slot: Any

    def ends(self) -> Any:
        """Return the first slot and that of the query, within the cache, int32[2]."""
        import jax.numpy as jnp

        ends = [jnp.asarray(x, "int32") for x in (self.first, self.slot)]
        return jnp.clip(jnp.stack(ends), 0, self.mask.shape[1] - 1)


class Scoring(NamedTuple):
    """What is done to scores.

    Attributes:
        soft_cap: they become `cap * tanh(scores / cap)`.
        slopes: float[key heads, groups], how much a score falls for each token back.
        sinks: float[key heads, groups], one more score in each softmax, of no key.
    """

    soft_cap: float | None = None
    slopes: Any = None
    sinks: Any = None


class _Sizes(NamedTuple):
    """Sizes of a cache and of its queries, and how the slots are shared out.

    Attributes:
        batch: rows.
        heads: of keys and values.
        groups: queries that share a key.
        size: of a head.
        slots: of the cache.
    """

    batch: int
    heads: int
    groups: int
    size: int
    slots: int

    @property
    def filled(self) -> tuple[int, int]:
        """Queries that share a key, and numbers of a head, filled up to powers of two."""
        rows, width = (1 << (n - 1).bit_length() for n in (self.groups, self.size))
        return max(rows, _LEAST_SIZE), max(width, _LEAST_SIZE)

    @property
    def block(self) -> int:
        """How many slots a program reads at once: a power of two, and not more than there are."""
        most = 1 << (self.slots.bit_length() - 1)
        return max(min(_NUMBERS // self.filled[1], most), _LEAST_SIZE)

    @property
    def fit(self) -> bool:
        """Whether a program can keep what it works on."""
        rows, width = self.filled
        return self.block * width <= _NUMBERS and rows * max(width, self.block) <= _MOST_MIXED

    @property
    def parts(self) -> int:
        """Among how many programs the slots of a head are shared out."""
        most = min(-(-self.slots // self.block) // _LEAST_BLOCKS, _MOST_PARTS)
        return gpu.parts_of(self.batch * self.heads, _PROGRAMS, most)


def takes(query: Any, keys: Any) -> bool:
    """Tell whether `attend_one` is for these arrays, [batch, time or slots, heads, size]."""
    (_, time, num_heads, size), (_, slots, heads, _) = query.shape, keys.shape
    return (
        time == 1
        and isinstance(slots, int)
        and slots >= _LEAST_SIZE
        and _Sizes(1, heads, num_heads // heads, size, slots).fit
        and query.dtype == keys.dtype
        and keras.backend.standardize_dtype(query.dtype) in ("bfloat16", "float16")
        and _runs()
    )


def _runs() -> bool:
    """Tell whether each device that the program that is being made is for runs kernels."""
    with target.on_each_device():
        return gpu.available()


def attend_one(
    token: Any, keys: Any, values: Any, seen: Seen, scoring: Scoring, num_heads: int
) -> tuple[Any, Any, Any]:
    """Mix the values that one query of each head sees.

    Token, keys and values are of one dtype.

    Args:
        token: [batch, heads, size], the scaled queries of one token, and behind them its keys and
            its values, if these are to be written first.
        keys: [batch, slots, key heads, size].
        values: [batch, slots, key heads, size].
        seen: what the queries see.
        scoring: what is done to scores.
        num_heads: number of query heads.

    Returns:
        [batch, num_heads, size], zeros where nothing is seen, and the keys and values with the new
        ones.
    """
    from jax.experimental import pallas as pl

    batch, slots, heads, size = keys.shape
    sizes = _Sizes(batch, heads, num_heads // heads, size, slots)
    is_new = token.shape[1] > num_heads
    rows, width = sizes.filled
    of_head = pl.BlockSpec((None, slots, None, width), lambda b, h, j: (b, 0, h, 0))
    of_groups = pl.BlockSpec((None, rows), lambda b, h, j: (h, 0))
    operands = [
        (token, pl.BlockSpec((None, token.shape[1], width), lambda b, h, j: (b, 0, 0))),
        (keys, of_head),
        (values, of_head),
        (seen.mask.astype("int8"), pl.BlockSpec((None, slots), lambda b, h, j: (b, 0))),
        (seen.ends(), pl.BlockSpec((2,), lambda b, h, j: (0,))),
        *[(x, of_groups) for x in scoring[1:] if x is not None],
    ]
    mixed, logs, *written = gpu.call(
        _attend_one,
        operands,
        [*_made(sizes, keys.dtype), *[(x, of_head) for x in (keys, values) if is_new]],
        (batch, heads, sizes.parts),
        aliases={1: 2, 2: 3} if is_new else {},
        sizes=sizes,
        soft_cap=scoring.soft_cap,
        has=tuple(x is not None for x in scoring[1:]),
    )
    mixed = _together(mixed, logs).astype(keys.dtype).reshape(batch, num_heads, size)
    return mixed, *(written or (keys, values))


def _made(sizes: _Sizes, dtype: Any) -> list[tuple[Any, Any]]:
    """Return the shapes of what each part finds: the mixed values, and the logarithm of its sum."""
    import jax
    from jax.experimental import pallas as pl

    rows, width = sizes.filled
    lead = (sizes.parts, sizes.batch, sizes.heads, sizes.groups)
    return [
        (
            jax.ShapeDtypeStruct((*lead, sizes.size), "float32" if sizes.parts > 1 else dtype),
            pl.BlockSpec((None, None, None, rows, width), lambda b, h, j: (j, b, h, 0, 0)),
        ),
        (
            jax.ShapeDtypeStruct(lead, "float32"),
            pl.BlockSpec((None, None, None, rows), lambda b, h, j: (j, b, h, 0)),
        ),
    ]


def _attend_one(
    token_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    mask_ref: Any,
    ends_ref: Any,
    *refs: Any,
    sizes: _Sizes,
    soft_cap: float | None,
    has: tuple[bool, ...],
) -> None:
    """Attend to one part of the slots: every so manieth block of those that may be seen."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    more, (rows, width), block = list(refs), sizes.filled, sizes.block
    slopes_ref, sinks_ref = (more.pop(0) if there else None for there in has)
    mixed_ref, log_ref, *written_refs = more
    is_row, is_column = jnp.arange(rows) < sizes.groups, jnp.arange(width) < sizes.size
    is_number = is_row[:, None] & is_column[None]
    part, parts = pl.program_id(2), pl.num_programs(2)
    start, slot = ends_ref[0] // block, ends_ref[1]
    own = pl.ds(pl.program_id(1) * sizes.groups, rows)
    query = gpu.load(token_ref.at[own, :], is_number)
    slopes = gpu.load(slopes_ref, is_row).astype("float32") if has[0] else None

    def add(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        begin = (start + part + i * parts) * block
        first = jnp.minimum(begin, sizes.slots - block)  # the last block may overlap
        slots = first + jnp.arange(block)
        is_seen = (mask_ref[pl.ds(first, block)] != 0) & (slots >= begin)
        if written_refs:  # what is new may not be there yet
            is_seen &= slots != slot
        key, value = (_block(ref, first, sizes) for ref in (keys_ref, values_ref))
        scores = _capped(gpu.dot(query, key.T), soft_cap)
        if slopes is not None:
            scores -= slopes[:, None] * (slot - slots).astype("float32")[None]
        return _more(carry, scores, is_seen[None], lambda x: gpu.dot(x.astype(value.dtype), value))

    highest, total = jnp.full((rows,), _UNSEEN, "float32"), jnp.zeros((rows,), "float32")
    if has[1]:  # the sinks, in the first part alone
        sinks = gpu.load(sinks_ref, is_row).astype("float32")
        highest, total = jnp.where(part == 0, sinks, highest), jnp.where(part == 0, 1.0, total)
    count = pl.cdiv(slot // block + 1 - start - part, parts)
    carry = (jnp.zeros((rows, width), "float32"), highest, total)
    carry = jax.lax.fori_loop(0, count, add, carry)
    if written_refs:
        is_own = (slot // block - start) % parts == part
        key, value = _write(token_ref, written_refs, sizes, slot, is_own)
        scores = jnp.sum(query.astype("float32") * key[None], axis=1, keepdims=True)
        is_seen = (is_own & (mask_ref[pl.ds(slot, 1)] != 0))[None]
        carry = _more(carry, _capped(scores, soft_cap), is_seen, lambda x: x * value[None])
    mixed, highest, total = carry
    divisor = jnp.where(total > 0, total, 1.0)
    gpu.store(mixed_ref, (mixed / divisor[:, None]).astype(mixed_ref.dtype), is_number)
    gpu.store(log_ref, jnp.where(total > 0, highest + jnp.log(divisor), _UNSEEN), is_row)


def _capped(scores: Any, soft_cap: float | None) -> Any:
    import jax.numpy as jnp

    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def _write(
    token_ref: Any, written_refs: list[Any], sizes: _Sizes, slot: Any, is_own: Any
) -> tuple[Any, Any]:
    """Write the key and the value of a head, if this is the part to do so, and return both."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    width = sizes.filled[1]
    is_column = jnp.arange(width) < sizes.size
    rows = [sizes.heads * (sizes.groups + i) + pl.program_id(1) for i in (0, 1)]
    new = [gpu.load(token_ref.at[row, :], is_column) for row in rows]
    for ref, one in zip(written_refs, new, strict=True):
        gpu.store(ref.at[pl.ds(slot, 1), :], one[None], (is_column & is_own)[None])
    key, value = (x.astype("float32") for x in new)
    return key, value


def _block(ref: Any, first: Any, sizes: _Sizes) -> Any:
    """Read some slots of a head, [block, width]."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    width = sizes.filled[1]
    is_column = None
    if width > sizes.size:
        is_column = jnp.broadcast_to(jnp.arange(width) < sizes.size, (sizes.block, width))
    return gpu.load(ref.at[pl.ds(first, sizes.block), :], is_column)


def _more(
    carry: tuple[Any, Any, Any], scores: Any, is_seen: Any, mix: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """Go on with a softmax by further scores, and mix their values.

    Args:
        carry: what was mixed so far, the highest score, and the sum of what is mixed.
        scores: float32[rows, block].
        is_seen: bool[1, block].
        mix: multiplies shares, float32[rows, block], and values, to float32[rows, width].
    """
    import jax.numpy as jnp

    mixed, highest, total = carry
    scores = jnp.where(is_seen, scores, _UNSEEN)
    above = jnp.maximum(highest, jnp.max(scores, axis=1))
    shares = jnp.where(is_seen, jnp.exp(scores - above[:, None]), 0.0)
    kept = jnp.exp(highest - above)
    return mixed * kept[:, None] + mix(shares), above, total * kept + jnp.sum(shares, axis=1)


def _together(mixed: Any, logs: Any) -> Any:
    """Put together what the parts found, written out so that XLA makes one kernel of it."""
    import jax.numpy as jnp

    if len(logs) == 1:
        return mixed[0]
    highest = functools.reduce(jnp.maximum, list(logs))
    shares = [jnp.exp(log - highest)[..., None] for log in logs]
    mixed = [share * one for share, one in zip(shares, mixed, strict=True)]
    return added_up(mixed) / added_up(shares)
