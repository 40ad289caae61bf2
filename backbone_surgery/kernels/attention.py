"""Attention of few queries over a cache, as LLVM's IR; keys and values are read as they lie, once.

Of a cache only the slots are read that queries may see. One query takes slot after slot. Several
take blocks of them, and of each block head after head: what a query adds up stays in registers.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from backbone_surgery.kernels.builder import FLOAT, INT, POINTER, STORED, Builder, per_line


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
    shape = heads, queries, size
    # A query of a large head fills the registers, and few of them wait for memory as it is.
    in_blocks = queries > 1 and size <= 32 * queries
    whole = _whole_blocks(b, first, stop) if in_blocks else first
    with b.loop(first, whole, width) as slot, b.loop(0, heads) as head:
        with b.loop(0, queries) as i:
            row = b.sum(b.product(head, queries), i)
            query = [b.load(q, b.product(row, size), at) for at in range(0, size, width)]
            sums = []
            for start in _rows(b, dtype, k, slot, head, shape, i):
                total = b.zeros
                for place, vector in enumerate(query):
                    key = b.load_as_floats(dtype, k, start, place * width)
                    total = b.add_product(vector, key, total)
                sums.append(total)
            b.store(b.totals(sums), s, b.product(row, slots), slot)
    with b.loop(whole, stop) as slot, b.loop(0, heads) as head:
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
    shape = heads, queries, size
    with b.loop(0, heads * queries * size, width) as j:
        b.store(b.zeros, y, j)
    whole = _whole_blocks(b, first, stop) if queries > 1 else first
    with b.loop(first, whole, width) as slot, b.loop(0, heads) as head:
        with b.loop(0, queries) as i:
            row = b.sum(b.product(head, queries), i)
            places = range(0, size, width)
            sums = [b.load(y, b.product(row, size), place) for place in places]
            for n, start in enumerate(_rows(b, dtype, v, slot, head, shape, i)):
                share = b.scalar(p, b.product(row, slots), slot, n)
                values = [b.load_as_floats(dtype, v, start, place) for place in places]
                sums = [b.add_product(share, *pair) for pair in zip(values, sums, strict=True)]
            for place, total in zip(places, sums, strict=True):
                b.store(total, y, b.product(row, size), place)
    with b.loop(whole, stop) as slot, b.loop(0, heads) as head:
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


def _whole_blocks(b: Builder, first: Any, stop: Any) -> Any:
    """Return where whole blocks of slots end: a block has as many as a vector has numbers."""
    return b.ir.sub(stop, b.ir.srem(b.ir.sub(stop, first), INT(b.width)))


def _rows(
    b: Builder, dtype: str, cache: Any, slot: Any, head: Any, shape: tuple[int, int, int], i: Any
) -> Iterator[Any]:
    """Tell where each row of a head lies in a block of slots, and ask for some of the next block.

    It is asked for in the order in which it lies, in equal shares.

    Args:
        b: writes.
        dtype: of the cache.
        cache: where it lies.
        slot: the first of the block.
        head: of the rows.
        shape: heads, queries and the size of a head.
        i: the query that reads them.
    """
    heads, queries, size = shape
    line, slots = per_line(dtype), b.width
    count = -(-size * slots // (line * queries * slots))  # of lines for each row and query
    following = b.product(b.sum(b.product(b.sum(slot, slots), heads), b.product(head, slots)), size)
    ahead = b.sum(following, b.product(i, slots * count * line))
    for n in range(slots):
        for j in range(count):
            b.prefetch(cache, ahead, (n * count + j) * line)
        yield b.product(b.sum(b.product(b.sum(slot, n), heads), head), size)


def write_zeros(b: Builder, s: Any, rows: int, slots: Any, first: Any, stop: Any) -> None:
    """Write zeros for the slots that are not read."""
    for begin, end in ((INT(0), first), (stop, slots)):
        with b.loop(0, rows) as row, b.loop(begin, end) as slot:
            b.ir.store(ir.Constant(FLOAT, 0.0), b.at(s, b.product(row, slots), slot))


def _arguments(dtype: str) -> list[Any]:
    """Return the types of rows, of a cache, of what is written, and of three integers."""
    return [POINTER, STORED[dtype].as_pointer(), POINTER, INT, INT, INT]
