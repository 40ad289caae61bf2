"""Attention of few queries over a cache, as LLVM's IR; keys and values are read as they lie, once.

Of a cache only the slots are read that queries may see.
"""

from typing import Any

from llvmlite import ir

from backbone_surgery.kernels.builder import FLOAT, INT, POINTER, STORED, Builder


def write_scores(
    module: ir.Module, width: int, dtype: str, heads: int, queries: int, size: int
) -> str:
    """Write `scores(q, k, s, first, stop, slots)`: s[h, i, j] = q[h, i] · k[j, h] for j of a range.

    q is float32[heads, queries, size], k [slots, heads, size] of the dtype and s float32[heads,
    queries, slots]; size divides by the width.

    Args:
        module: to add it to.
        width: floats of a vector.
        dtype: of the cache.
        heads: of keys.
        queries: for each of them.
        size: of a head.
    """
    b = Builder(module, "scores", _arguments(dtype), width)
    q, k, s, first, stop, slots = b.function.args
    with b.loop(first, stop) as slot, b.loop(0, heads) as head:
        start = b.product(b.sum(b.product(slot, heads), head), size)
        key = [b.load_as_floats(dtype, k, start, at) for at in range(0, size, width)]
        for i in range(queries):
            row = b.sum(b.product(head, queries), i)
            total = b.zeros
            for place, vector in enumerate(key):
                query = b.load(q, b.product(row, size), place * width)
                total = b.add_product(query, vector, total)
            b.ir.store(b.total(total), b.at(s, b.product(row, slots), slot))
    b.ir.ret_void()
    return "scores"


def write_mix(
    module: ir.Module, width: int, dtype: str, heads: int, queries: int, size: int
) -> str:
    """Write `mix(p, v, y, first, stop, slots)`: y[h, i] = Σ p[h, i, j] · v[j, h] over a range.

    p is float32[heads, queries, slots], v [slots, heads, size] of the dtype and y float32[heads,
    queries, size]; for the rest see `write_scores`.
    """
    b = Builder(module, "mix", _arguments(dtype), width)
    p, v, y, first, stop, slots = b.function.args
    with b.loop(0, heads * queries * size, width) as j:
        b.store(b.zeros, y, j)
    with b.loop(first, stop) as slot, b.loop(0, heads) as head:
        start = b.product(b.sum(b.product(slot, heads), head), size)
        value = [b.load_as_floats(dtype, v, start, at) for at in range(0, size, width)]
        for i in range(queries):
            row = b.sum(b.product(head, queries), i)
            share = b.scalar(p, b.product(row, slots), slot)
            for place, vector in enumerate(value):
                at = b.product(row, size), place * width
                b.store(b.add_product(share, vector, b.load(y, *at)), y, *at)
    b.ir.ret_void()
    return "mix"


def write_zeros(b: Builder, s: Any, rows: int, slots: Any, first: Any, stop: Any) -> None:
    """Write zeros for the slots that are not read."""
    for begin, end in ((INT(0), first), (stop, slots)):
        with b.loop(0, rows) as row, b.loop(begin, end) as slot:
            b.ir.store(ir.Constant(FLOAT, 0.0), b.at(s, b.product(row, slots), slot))


def _arguments(dtype: str) -> list[Any]:
    """Return the types of rows, of a cache, of what is written, and of three integers."""
    return [POINTER, STORED[dtype].as_pointer(), POINTER, INT, INT, INT]
