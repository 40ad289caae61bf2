"""The kernels as functions of JAX arrays, inside a program for a CPU."""

import contextvars
import functools
import importlib.util
import operator
import os
import platform
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

import numpy as np

from backbone_surgery.contexts import setting

_LEAST, _LEAST_OF_CACHE = 1 << 17, 1 << 15
"""Numbers of a matrix or a cache; more are worth a kernel."""

_STORED = ("float32", "bfloat16", "int8")

_MOST_ROWS_BY_COLUMNS = {"float32": 48, "bfloat16": 12, "int8": 16}
_MOST_ROWS_OF_DOTS = {"float32": 64, "bfloat16": 16, "int8": 24}
"""With more rows XLA's products are faster: they pack the matrix, and multiply pairs of narrow
numbers. See docs/performance.md."""

_MOST_SUMS = 4096
"""Sums that are read and written for each row of a matrix; more leave the first cache."""

_MOST_QUERIES, _MOST_PARTS = 16, 8

_OLDEST = (0, 50)
"""Version of llvmlite, as the extra `cpu` has it."""

_in_use: contextvars.ContextVar[bool] = contextvars.ContextVar("kernels", default=False)


def in_use() -> AbstractContextManager[None]:
    """Have attention that is traced inside use kernels: in a program for one CPU, no gradients."""
    return setting({_in_use: True})


@functools.cache
def available() -> bool:
    """Tell whether llvmlite is installed, and the processor is one that kernels are for."""
    known = platform.machine() in ("x86_64", "AMD64") and os.name == "posix"
    if not known or importlib.util.find_spec("llvmlite") is None:
        return False
    if tuple(map(int, version("llvmlite").split(".")[:2])) < _OLDEST:
        return False  # of another package: the kernels were never compiled by it
    from backbone_surgery.kernels.processor import floats_of_vector

    return floats_of_vector() > 0


def count_parts() -> int:
    """Return into how many parts to cut a call: one for each core."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_PARTS)
    return min(os.cpu_count() or 1, _MOST_PARTS)


def worth_one(numbers: int) -> bool:
    """Tell whether a matrix of so many numbers is worth a kernel, where they are in use."""
    return _in_use.get() and numbers > _LEAST and available()


def _takes(x: Any, y: Any, least: int) -> bool:
    """Tell whether two arrays are of one dtype, and the second is worth a kernel."""
    known = x.dtype == y.dtype and y.dtype.name in _STORED
    return known and y.size > least and available()


def product(x: Any, y: Any, dimension_numbers: Any) -> Any | None:
    """Compute `jax.lax.dot_general` of few rows and a matrix; `None` where XLA should.

    What is narrow is multiplied and added up as float32, which holds whole numbers up to 2²⁴: so
    sums of int8 are rounded where XLA's wrap around later, beyond 2³¹.

    Args:
        x: one factor.
        y: the other.
        dimension_numbers: the axes that are summed over, and those of the batch, of both.

    Returns:
        float32, whatever the dtype of the factors.
    """
    import jax.numpy as jnp

    (left, right), (left_batch, right_batch) = dimension_numbers
    if x.size > y.size:  # the matrix comes first
        z = product(y, x, ((right, left), (right_batch, left_batch)))
        if z is None:
            return None
        batch, own = len(left_batch), y.ndim - len(right) - len(right_batch)
        axes = [*range(batch), *range(batch + own, z.ndim), *range(batch, batch + own)]
        return jnp.transpose(z, axes)
    if not _takes(x, y, _LEAST) or not left:
        return None
    rows = [a for a in range(x.ndim) if a not in (*left, *left_batch)]
    columns = [a for a in range(y.ndim) if a not in (*right, *right_batch)]
    order = np.argsort(right)  # of the axes that are summed over, as they lie in the matrix
    lies = [*right_batch, *np.take(right, order)]
    x = jnp.transpose(x, [*left_batch, *rows, *np.take(left, order)]).astype("float32")
    shape = (*(y.shape[a] for a in right_batch), *(x.shape[len(left_batch) :][: len(rows)]))
    shape = (*shape, *(y.shape[a] for a in columns))
    inner = int(np.prod([y.shape[a] for a in right]))
    if [*lies, *columns] == [*range(y.ndim)]:
        z = _by_columns(x.reshape(-1, x.size // inner // _count(y, right_batch), inner), y, inner)
    elif [*columns, *np.take(right, order)] == [*range(y.ndim)]:
        z = _dots(x.reshape(-1, inner), y.reshape(-1, inner))
    else:
        return None
    return None if z is None else z.reshape(shape)


def _count(y: Any, axes: Any) -> int:
    return int(np.prod([y.shape[a] for a in axes]))


def _by_columns(x: Any, y: Any, inner: int) -> Any | None:
    """Multiply x, [batch, rows, inner], by y, whose axes lie as [batch, inner, columns]."""
    batch, rows, _ = x.shape
    columns = y.size // inner // batch
    if rows > _MOST_ROWS_BY_COLUMNS[y.dtype.name] or columns % 16 or inner % 8:
        return None
    import jax

    from backbone_surgery.kernels.targets import columns_target

    parts = count_parts()
    wide = rows == 1 and columns > _MOST_SUMS
    whole = batch >= parts  # each part then has matrices of its own; else a piece of each
    shape = (1 if whole else parts, batch, rows, columns)
    call = jax.ffi.ffi_call(
        columns_target(y.dtype.name, rows, whole, wide), jax.ShapeDtypeStruct(shape, x.dtype)
    )
    z = call(x, y.reshape(batch, inner, columns), parts=np.int64(parts))
    return added_up(z)


def added_up(pieces: Any) -> Any:
    """Add up what the parts of a call found: XLA adds arrays faster than it sums over an axis."""
    return functools.reduce(operator.add, list(pieces))


def _dots(x: Any, y: Any) -> Any | None:
    """Multiply x, [rows, inner], by the rows of y, [n, inner]."""
    if len(x) > _MOST_ROWS_OF_DOTS[y.dtype.name] or x.shape[1] % 16:
        return None
    import jax

    from backbone_surgery.kernels.targets import dots_target

    shape = jax.ShapeDtypeStruct((len(x), len(y)), np.float32)
    return jax.ffi.ffi_call(dots_target(y.dtype.name, len(x)), shape)(
        x, y, parts=np.int64(count_parts())
    )


def attends(rows: Any, cache: Any) -> bool:
    """Tell whether attention of few queries over a cache is for the kernels.

    Args:
        rows: queries or their shares, [batch, heads, queries, ...], by the heads of the cache.
        cache: keys or values, [batch, slots, heads, size].
    """
    if not _in_use.get():  # other backends have shapes that are not known
        return False
    few = rows.shape[2] <= _MOST_QUERIES and cache.shape[3] % 16 == 0
    return few and cache.dtype.name != "int8" and _takes(rows, cache, _LEAST_OF_CACHE)


def scores(query: Any, key: Any, first: Any, stop: Any) -> Any:
    """Multiply queries by the keys of slots from `first` to `stop`, int32[]; zeros elsewhere.

    Returns [batch, heads, queries, slots], of the dtype of the keys.
    """
    from backbone_surgery.kernels.targets import scores_target

    _, heads, queries, size = query.shape
    target = scores_target(key.dtype.name, heads, queries, size)
    shape = (*query.shape[:3], key.shape[1])
    return _over_slots(target, shape, query, key, first, stop).astype(key.dtype)


def mix(shares: Any, value: Any, first: Any, stop: Any) -> Any:
    """Mix the values of slots from `first` to `stop` by shares, [batch, heads, queries, slots].

    Returns [batch, heads, queries, size], of the dtype of the values.
    """
    from backbone_surgery.kernels.targets import mix_target

    _, heads, queries, _ = shares.shape
    target = mix_target(value.dtype.name, heads, queries, value.shape[3])
    shape = (count_parts(), *shares.shape[:3], value.shape[3])
    return added_up(_over_slots(target, shape, shares, value, first, stop)).astype(value.dtype)


def _over_slots(target: str, shape: Any, x: Any, cache: Any, first: Any, stop: Any) -> Any:
    import jax
    import jax.numpy as jnp

    slots = cache.shape[1]
    bounds = jnp.stack([jnp.clip(jnp.asarray(n, "int32"), 0, slots) for n in (first, stop)])
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, np.float32))
    # In the shape that the loop carries it in, or XLA would write new slots to a copy.
    packed = cache.reshape([n for n in cache.shape if n > 1])
    return call(x.astype(np.float32), packed, bounds, parts=np.int64(count_parts()))
