"""Products of few rows by a matrix of four bits, as LLVM's IR; see `Packed` for how it may lie.

The numbers of a group of inputs are multiplied as they are, 8 too large. Then the sums of the group
are mended by what zero is, and scaled.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from backbone_surgery.kernels.builder import BYTES, FLOAT, INT, LINE, POINTER, STORED, Builder

_TOO_LARGE = ir.Constant(FLOAT, 8.0)


def write_columns(
    module: ir.Module, width: int, pairs: str, scale: str, zero: str, m: int, depth: int
) -> str:
    """Write a product by some columns of a matrix whose outputs lie next to each other.

    `columns(x, of_x, w, scale, zero, y, sums, first, stop, size, groups, count)` takes the bytes
    from `first` to `stop` of each row of w, [groups * size, count]. x is float32[inputs, m]; of_x
    float32[m, groups], its sums; scale and zero [groups, outputs]; y float32[m, outputs]. sums is
    room for as many as y, where those of some columns lie next to each other. `first` and `stop`
    divide by the width.

    Args:
        module: to add it to.
        width: floats of a vector.
        pairs: of "outputs" or "inputs".
        scale: dtype of what it is named after; `zero` likewise.
        zero: see `scale`.
        m: rows of x.
        depth: rows of w to take at once; `size` divides by it.
    """
    b = Builder(module, "columns", _arguments(scale, zero, 5, POINTER), width)
    x, of_x, w, scales, zeros, y, sums, first, stop, size, groups, count = b.function.args
    each, per = (2, 1) if pairs == "outputs" else (1, 2)  # outputs, and inputs, of a byte

    def clear(pointer: Any, start: Any, end: Any) -> None:
        with b.loop(start, end, width) as j:
            b.store(b.zeros, pointer, j)

    @contextlib.contextmanager
    def blocks() -> Iterator[tuple[Any, Any, Callable[..., Any]]]:
        """Go over the columns; yields where some begin and end, and where their sums lie."""
        with b.loop(first, stop, LINE) as start:
            end = b.least(b.sum(start, LINE), stop)
            length = b.ir.sub(end, start)

            def place(row: Any, j: Any, half: int) -> Any:
                own = b.product(b.sum(b.product(row, each), half), length)
                return b.sum(b.product(start, m * each), own, b.ir.sub(j, start))

            yield start, end, place

    def multiply(k: Any, j: Any, place: Callable[..., Any]) -> None:
        loaded = [b.load_pairs(w, b.product(b.sum(k, i), count), j) for i in range(depth)]
        with b.loop(0, m) as row:
            places = [place(row, j, half) for half in range(each)]
            totals = [b.load(sums, at) for at in places]
            for i in range(depth):
                for n in range(per):
                    at = b.sum(b.product(b.sum(b.product(b.sum(k, i), per), n), m), row)
                    factor = b.scalar(x, at)
                    numbers = loaded[i] if each == 2 else loaded[i][n : n + 1]
                    totals = [
                        b.add_product(factor, v, s) for v, s in zip(numbers, totals, strict=True)
                    ]
            for total, at in zip(totals, places, strict=True):
                b.store(total, sums, at)

    def finish(group: Any, row: Any, j: Any, place: Callable[..., Any]) -> None:
        of_group = b.ir.fneg(b.scalar(of_x, b.product(row, groups), group))
        found = [b.load(sums, place(row, j, half)) for half in range(each)]
        outputs = b.product(count, each)
        for n, vector in enumerate(b.interleaved(*found) if each == 2 else found):
            output = b.sum(b.product(j, each), n * width)
            at, own = b.sum(b.product(group, outputs), output), b.product(row, outputs)
            zero_point = b.ir.fadd(b.load_as_floats(zero, zeros, at), b.splat(_TOO_LARGE))
            mended = b.add_product(of_group, zero_point, vector)
            factor, before = b.load_as_floats(scale, scales, at), b.load(y, own, output)
            b.store(b.add_product(mended, factor, before), y, own, output)

    with b.loop(0, m) as row:
        own = b.product(row, count, each)
        clear(y, b.sum(own, b.product(first, each)), b.sum(own, b.product(stop, each)))
    with b.loop(0, groups) as group:
        clear(sums, b.product(first, m * each), b.product(stop, m * each))
        with b.loop(0, size, depth) as i, blocks() as (start, end, place):
            k = b.sum(b.product(group, size), i)
            for row in range(depth):
                b.prefetch(w, b.product(b.sum(k, depth + row), count), start)
            with b.loop(start, end, width) as j:
                multiply(k, j, place)
        with blocks() as (start, end, place), b.loop(0, m) as row, b.loop(start, end, width) as j:
            finish(group, row, j, place)
    b.ir.ret_void()
    return "columns"


def write_dots(module: ir.Module, width: int, scale: str, zero: str, m: int, most: int) -> str:
    """Write a product by some rows of a matrix, whose inputs lie next to each other.

    `dots(x, of_x, w, scale, zero, y, first, stop, size, groups, count)` takes the rows from `first`
    to `stop` of w, bytes[count, groups * size]. x is float32[m, 2, groups * size], the first of
    each pair of inputs before; of_x float32[m, groups], its sums; scale and zero [count, groups];
    y float32[m, count]. `size` divides by the width.

    Args:
        module: to add it to.
        width: floats of a vector.
        scale: dtype of what it is named after; `zero` likewise.
        zero: see `scale`.
        m: rows of x.
        most: rows of x to multiply at a time, by two rows of w.
    """
    b = Builder(module, "dots", _arguments(scale, zero, 5), width)
    x, of_x, w, scales, zeros, y, first, stop, size, groups, count = b.function.args
    inner = b.product(groups, size)
    turns = [range(i, min(i + most, m)) for i in range(0, m, most)]

    def sums_of(rows: range, v: Any, at_once: int, start: Any) -> list[Any]:
        """Multiply by a group of some rows of w; sums of each row of x by each of w."""
        places = [(i, r) for i in rows for r in range(at_once)]
        with b.carrying(0, size, width, [b.zeros] * 2 * len(places)) as (j, now, following):
            at = b.sum(start, j)
            taken = [b.load_pairs(w, b.product(b.sum(v, r), inner), at) for r in range(at_once)]
            own = {i: [b.load(x, b.product(2 * i + h, inner), at) for h in (0, 1)] for i in rows}
            for n, (i, r) in enumerate(places):
                for h in (0, 1):
                    following.append(b.add_product(own[i][h], taken[r][h], now[2 * n + h]))
        return [b.ir.fadd(*now[2 * n : 2 * n + 2]) for n in range(len(places))]

    def write(rows: range, v: Any, at_once: int) -> None:
        places = [(i, r) for i in rows for r in range(at_once)]
        begin = [b.zeros] * len(places) + [ir.Constant(FLOAT, 0.0)] * len(places)
        with b.carrying(0, groups, 1, begin) as (group, now, following):
            found = sums_of(rows, v, at_once, b.product(group, size))
            scaled, mended = [], []
            for n, (i, r) in enumerate(places):
                at = b.sum(b.product(b.sum(v, r), groups), group)
                own = b.number_as_float(scale, scales, at)
                scaled.append(b.add_product(b.splat(own), found[n], now[n]))
                of_group = b.ir.load(b.at(of_x, b.product(i, groups), group))
                more = b.ir.fadd(b.number_as_float(zero, zeros, at), _TOO_LARGE)
                lost = b.ir.fmul(b.ir.fmul(own, more), of_group)
                mended.append(b.ir.fadd(now[len(places) + n], lost))
            following.extend([*scaled, *mended])
        for n, (i, r) in enumerate(places):
            total = b.ir.fsub(b.total(now[n]), now[len(places) + n])
            b.ir.store(total, b.at(y, b.product(i, count), v, r))

    pairs = b.ir.sub(stop, b.ir.srem(b.ir.sub(stop, first), INT(2)))
    for start, end, at_once in ((first, pairs, 2), (pairs, stop, 1)):
        with b.loop(start, end, at_once) as v:
            for rows in turns:
                write(rows, v, at_once)
    b.ir.ret_void()
    return "dots"


def _arguments(scale: str, zero: str, numbers: int, *more: Any) -> list[Any]:
    """Return the types of x, of_x, w, scale, zero, y, what else there is, and some integers."""
    of_groups = [STORED[dtype].as_pointer() for dtype in (scale, zero)]
    return [POINTER, POINTER, BYTES, *of_groups, POINTER, *more, *[INT] * numbers]
