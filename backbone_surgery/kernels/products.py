"""Products of few rows by a matrix, as LLVM's IR; the matrix is read once, from first to last.

Memory is read fastest in one stream, one address after another. So a matrix is taken in groups of
rows that lie next to each other, and while one group is multiplied the next is asked for in the
order in which it lies.
"""

from typing import Any

from llvmlite import ir

from backbone_surgery.kernels.builder import INT, INT32, POINTER, STORED, Builder, per_line

_COLUMNS = 192
"""How many columns to take at once: so many of a group and of the sums fit the first cache."""

_BLOCK = 16
"""Rows of a matrix that come from the second cache again for each few rows of x, which stay in the
first."""

_STEPS = 4
"""Steps of the inner loop over one row to write out."""

_AHEAD = 16
"""How many rows ahead to ask for, where several are multiplied at once."""


def write_stream(module: ir.Module, width: int, dtype: str, at_once: int) -> str:
    """Write `stream(x, w, y, first, stop, K, columns)`: y = x[first:stop] @ w[first:stop].

    x is float32[K], w [K, columns] of the dtype, y float32[columns]; columns divides by the width.
    The sums in y are read and written once for the rows that are multiplied at once. The processor
    asks for one row after another by itself; several have to be asked for.

    Args:
        module: to add it to.
        width: floats of a vector.
        dtype: of w.
        at_once: rows of w to multiply at once; first and stop divide by it.
    """
    b = Builder(module, "stream", _arguments(dtype, 4), width)
    x, w, y, first, stop, _, columns = b.function.args
    line = per_line(dtype)
    with b.loop(0, columns, width) as j:
        b.store(b.zeros, y, j)
    whole = b.ir.sub(columns, b.ir.srem(columns, INT(_STEPS * width)))
    with b.loop(first, stop, at_once) as k:
        factors = [b.scalar(x, k, r) for r in range(at_once)]
        rows = [b.product(b.sum(k, r), columns) for r in range(at_once)]
        following = b.product(b.sum(k, _AHEAD), columns)
        for start, end, steps in ((0, whole, _STEPS), (whole, columns, 1)):
            with b.loop(start, end, steps * width) as j:
                if at_once > 1:
                    for i in range(0, steps * width * at_once, line):
                        b.prefetch(w, following, b.product(j, at_once), i)
                for step in range(steps):
                    at = b.sum(j, step * width)
                    sums = b.load(y, at)
                    for factor, row in zip(factors, rows, strict=True):
                        sums = b.add_product(factor, b.load_as_floats(dtype, w, row, at), sums)
                    b.store(sums, y, at)
    b.ir.ret_void()
    return "stream"


def write_groups(module: ir.Module, width: int, dtype: str, m: int, group: int) -> str:
    """Write `groups_{m}(x, w, y, first, stop, K, columns)`: y = x[:, first:stop] @ w[first:stop].

    x is float32[m, K], w [K, columns] of the dtype, y float32[m, columns]; columns divides by the
    width, and first and stop by `group`. Two rows of x are multiplied at a time, and three at last
    where their number is odd.

    Args:
        module: to add it to.
        width: floats of a vector.
        dtype: of w.
        m: rows of x.
        group: rows of a group.
    """
    b = Builder(module, f"groups_{m}", _arguments(dtype, 4), width)
    x, w, y, first, stop, inner, columns = b.function.args
    last, line = 3 if m % 2 else 0, per_line(dtype)
    turns = m // 2
    lines = -(-group * width // (line * turns))  # of the next group, to ask for at each step
    with b.loop(0, b.product(m, columns), width) as j:
        b.store(b.zeros, y, j)
    with b.loop(first, stop, group) as k, b.loop(0, columns, _COLUMNS) as start:
        end = b.least(b.sum(start, _COLUMNS), columns)
        following = b.product(b.sum(k, group), columns)

        def rows(i: Any, count: int) -> None:
            factors = [
                [b.scalar(x, b.product(b.sum(i, r), inner), k, g) for g in range(group)]
                for r in range(count)
            ]
            own = [b.product(b.sum(i, r), columns) for r in range(count)]
            # Counted in floats: of all steps of this group, those that came before these.
            before = b.product(b.ir.sdiv(b.sum(i), INT(2)), b.ir.sub(end, start))
            before = b.ir.sub(b.sum(b.product(start, turns), before), start)
            with b.loop(start, end, width) as j:
                ahead = b.ir.sdiv(b.product(b.sum(before, j), lines * line), INT(width))
                for i in range(lines):
                    b.prefetch(w, following, ahead, i * line)
                loaded = [
                    b.load_as_floats(dtype, w, b.product(b.sum(k, g), columns), j)
                    for g in range(group)
                ]
                for row, numbers in zip(own, factors, strict=True):
                    sums = b.load(y, row, j)
                    for number, vector in zip(numbers, loaded, strict=True):
                        sums = b.add_product(number, vector, sums)
                    b.store(sums, y, row, j)

        with b.loop(0, m - last, 2) as i:
            rows(i, 2)
        if last:
            rows(INT(m - last), last)
    b.ir.ret_void()
    return f"groups_{m}"


def write_dots(module: ir.Module, width: int, dtype: str, m: int, most: int) -> str:
    """Write `dots_{m}(x, w, y, first, stop, K, n)`: y[:, first:stop] = x @ w[first:stop].T.

    x is float32[m, K], w [n, K] of the dtype, and y float32[m, n]; K divides by the width.

    Args:
        module: to add it to.
        width: floats of a vector.
        dtype: of w.
        m: rows of x.
        most: rows of x to multiply at a time, by two rows of w.
    """
    b = Builder(module, f"dots_{m}", _arguments(dtype, 4), width)
    x, w, y, first, stop, inner, count = b.function.args
    size = -(-m // -(-m // most))
    turns = [range(i, min(i + size, m)) for i in range(0, m, size)]
    pairs = first if m == 1 else b.ir.sub(stop, b.ir.srem(b.ir.sub(stop, first), INT(2)))

    def write(rows: range, v: Any, at_once: int, asks: list[int]) -> None:
        totals = _dots(b, dtype, x, w, rows, b.product(v, inner), at_once, inner, asks)
        for (row, r), total in totals.items():
            b.ir.store(total, b.at(y, b.product(count, row), v, r))

    with b.loop(first, pairs, _BLOCK) as start:
        end = b.least(b.sum(start, _BLOCK), pairs)
        for turn, rows in enumerate(turns):
            asks = [r for r in (0, 1) if r * len(turns) // 2 == turn]
            with b.loop(start, end, 2) as v:
                write(rows, v, 2, asks)
    with b.loop(pairs, stop) as v:
        for rows in turns:
            write(rows, v, 1, [])
    b.ir.ret_void()
    return f"dots_{m}"


def _dots(
    b: Builder,
    dtype: str,
    x: Any,
    w: Any,
    rows: range,
    start: Any,
    at_once: int,
    inner: Any,
    asks: list[int],
) -> dict[tuple[int, int], Any]:
    """Multiply rows of x by one or two rows of w, and add up; ask for some of the next block."""
    places, line = [(i, r) for i in rows for r in range(at_once)], per_line(dtype)
    with b.carrying(0, inner, b.width, [b.zeros] * len(places)) as (k, now, following):
        for r in asks:
            ahead = b.sum(b.product(inner, _BLOCK + r), k)
            for number in range(max(b.width // line, 1)):
                b.prefetch(w, start, ahead, number * line)
        taken = [b.load_as_floats(dtype, w, start, b.product(inner, r), k) for r in range(at_once)]
        left = {i: b.load(x, b.product(inner, i), k) for i in rows}
        for (i, r), total in zip(places, now, strict=True):
            following.append(b.add_product(left[i], taken[r], total))
    if len(places) == b.width:
        whole = b.totals(now)
        return {place: b.ir.extract_element(whole, INT32(i)) for i, place in enumerate(places)}
    return {place: b.total(total) for place, total in zip(places, now, strict=True)}


def _arguments(dtype: str, numbers: int) -> list[Any]:
    """Return the types of x, w, y and some integers."""
    return [POINTER, STORED[dtype].as_pointer(), POINTER, *[INT] * numbers]
