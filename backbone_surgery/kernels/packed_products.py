"""Products of few rows by a matrix of four bits, as LLVM's IR; see `Packed` for how it may lie.

The numbers of a group of inputs are multiplied as they are, 8 too large. Then the sums of the group
are mended by what zero is, and scaled.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from backbone_surgery.kernels.builder import BYTES, FLOAT, INT, LINE, POINTER, STORED, Builder

_TOO_LARGE = ir.Constant(FLOAT, 8.0)


class _Arrays(NamedTuple):
    """What the functions that are written multiply, and the dtypes of scales and zero points."""

    scale: str
    zero: str
    x: Any
    of_x: Any
    w: Any
    scales: Any
    zeros: Any
    y: Any


def write_columns(
    module: ir.Module, width: int, pairs: str, scale: str, zero: str, m: int, depth: int
) -> str:
    """Write a product by some columns of a matrix whose outputs lie next to each other.

    `columns(x, of_x, w, scale, zero, y, sums, first, stop, size, groups, count, stretch, before,
    shared)` takes the bytes from `first` to `stop` of each row of w, [groups * size, count]. Each
    stretch of a row, of `stretch` bytes, has inputs of its own. x is float32[stretches, inputs, m];
    of_x float32[stretches, m, groups], its sums; y float32[m, outputs]. `shared` groups have a
    scale and a zero point for each output, counted from `before` groups ahead of the first: scale
    and zero are [all groups / shared, outputs]. sums is room for as many as y, where those of some
    columns lie next to each other. `first` and `stop` divide by the width, and `stretch`, unless it
    is `count`, by `LINE`.

    Args:
        module: to add it to.
        width: floats of a vector.
        pairs: of "outputs" or "inputs".
        scale: dtype of what it is named after; `zero` likewise.
        zero: see `scale`.
        m: rows of x.
        depth: rows of w to take at once; `size` divides by it.
    """
    b = Builder(module, "columns", _arguments(scale, zero, 8, POINTER), width)
    *arrays, sums, first, stop, size, groups, count, stretch, before, shared = b.function.args
    own, each = _Arrays(scale, zero, *arrays), 2 if pairs == "outputs" else 1
    stretches = b.ir.sdiv(first, stretch), b.ir.sdiv(b.sum(stop, stretch, -1), stretch)
    inputs = b.product(groups, size, 3 - each)
    c = _Columns(b, own, sums, (first, stop), stretches, stretch, inputs, count, m, each, depth)
    with b.loop(0, m) as row:
        at = b.product(row, count, each)
        c.clear(own.y, b.sum(at, b.product(first, each)), b.sum(at, b.product(stop, each)))
    with b.loop(0, groups) as group:
        c.clear(c.sums, b.product(first, m * each), b.product(stop, m * each))
        with b.loop(0, size, depth) as i, c.blocks() as (s, start, end, place):
            k = b.sum(b.product(group, size), i)
            for row in range(depth):
                b.prefetch(own.w, b.product(b.sum(k, depth + row), count), start)
            with b.loop(start, end, width) as j:
                c.multiply(s, k, j, place)
        scaled = b.ir.sdiv(b.sum(before, group), shared)
        with c.blocks() as (s, start, end, place), b.loop(0, m) as row:
            of_group = b.scalar(own.of_x, b.product(b.sum(b.product(s, m), row), groups), group)
            lost = b.ir.fneg(of_group)
            with b.loop(start, end, width) as j:
                c.finish(lost, scaled, row, j, place)
    b.ir.ret_void()
    return "columns"


class _Columns(NamedTuple):
    """Writes what `write_columns` consists of.

    Below k is a row of w, j a byte of it, s the stretch that it is of, and `place` what `blocks`
    yields: it tells where the sum for a row of x, a byte, and one of its outputs lies.

    Attributes are the arguments of the function that is written, those of `write_columns`, and:
        ends: the first byte of each row of w, and the one after the last.
        stretches: that of the first byte, and the one after that of the last.
        inputs: of a stretch.
        each: outputs of a byte; of a byte with one output there are two inputs.
    """

    b: Builder
    arrays: _Arrays
    sums: Any
    ends: tuple[Any, Any]
    stretches: tuple[Any, Any]
    stretch: Any
    inputs: Any
    count: Any
    m: int
    each: int
    depth: int

    def clear(self, pointer: Any, start: Any, end: Any) -> None:
        """Write zeros."""
        with self.b.loop(start, end, self.b.width) as j:
            self.b.store(self.b.zeros, pointer, j)

    @contextlib.contextmanager
    def blocks(self) -> Iterator[tuple[Any, Any, Any, Callable[..., Any]]]:
        """Go over each stretch; yields it, where some of its columns begin and end, and `place`."""
        b, each, (first, stop) = self.b, self.each, self.ends
        with b.loop(*self.stretches) as s:
            begin = b.most(first, b.product(s, self.stretch))
            with b.loop(begin, b.least(stop, b.product(b.sum(s, 1), self.stretch)), LINE) as start:
                end = b.least(b.sum(start, LINE), stop)
                length = b.ir.sub(end, start)

                def place(row: Any, j: Any, half: int) -> Any:
                    own = b.product(b.sum(b.product(row, each), half), length)
                    return b.sum(b.product(start, self.m * each), own, b.ir.sub(j, start))

                yield s, start, end, place

    def multiply(self, s: Any, k: Any, j: Any, place: Callable[..., Any]) -> None:
        """Multiply all rows by some rows of w, from k on."""
        b, per, taken = self.b, 3 - self.each, range(self.depth)
        loaded = [b.load_pairs(self.arrays.w, b.product(b.sum(k, i), self.count), j) for i in taken]
        x = b.at(self.arrays.x, b.product(s, self.inputs, self.m))
        with b.loop(0, self.m) as row:
            places = [place(row, j, half) for half in range(self.each)]
            totals = [b.load(self.sums, at) for at in places]
            for i, n in itertools.product(taken, range(per)):
                at = b.product(b.sum(b.product(b.sum(k, i), per), n), self.m)
                factor = b.scalar(x, at, row)
                numbers = loaded[i] if per == 1 else loaded[i][n : n + 1]
                both = zip(numbers, totals, strict=True)
                totals = [b.add_product(factor, vector, total) for vector, total in both]
            for total, at in zip(totals, places, strict=True):
                b.store(total, self.sums, at)

    def finish(self, lost: Any, scaled: Any, row: Any, j: Any, place: Callable[..., Any]) -> None:
        """Mend the sums of a group by what zero is, scale them, and add them to a row.

        Args:
            lost: the sum of its inputs, with the other sign.
            scaled: which scales and zero points are its own.
            row: of x.
            j: see `_Columns`.
            place: see `_Columns`.
        """
        b, arrays = self.b, self.arrays
        found = [b.load(self.sums, place(row, j, half)) for half in range(self.each)]
        outputs = b.product(self.count, self.each)
        for n, vector in enumerate(b.interleaved(*found) if self.each == 2 else found):
            output = b.sum(b.product(j, self.each), n * b.width)
            at, own = b.sum(b.product(scaled, outputs), output), b.product(row, outputs)
            zero_point = b.ir.fadd(
                b.load_as_floats(arrays.zero, arrays.zeros, at), b.splat(_TOO_LARGE)
            )
            mended = b.add_product(lost, zero_point, vector)
            factor = b.load_as_floats(arrays.scale, arrays.scales, at)
            before = b.load(arrays.y, own, output)
            b.store(b.add_product(mended, factor, before), arrays.y, own, output)


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
    *arrays, first, stop, size, groups, count = b.function.args
    own, inner = _Arrays(scale, zero, *arrays), b.product(groups, size)
    d = _Dots(b, own, size, groups, count, inner)
    turns = [range(i, min(i + most, m)) for i in range(0, m, most)]
    pairs = b.ir.sub(stop, b.ir.srem(b.ir.sub(stop, first), INT(2)))
    for start, end, at_once in ((first, pairs, 2), (pairs, stop, 1)):
        with b.loop(start, end, at_once) as v:
            for rows in turns:
                d.multiply([(i, r) for i in rows for r in range(at_once)], v)
    b.ir.ret_void()
    return "dots"


class _Dots(NamedTuple):
    """Writes what `write_dots` consists of; its attributes are as in `_Columns`.

    Below v is a row of w. Places are pairs: a row of x, and how far a row of w is from the first
    one that is taken.
    """

    b: Builder
    arrays: _Arrays
    size: Any
    groups: Any
    count: Any
    inner: Any

    def multiply(self, places: list[tuple[int, int]], v: Any) -> None:
        """Multiply rows of x by whole rows of w, from v on."""
        b, arrays = self.b, self.arrays
        begin = [b.zeros] * len(places) + [ir.Constant(FLOAT, 0.0)] * len(places)
        with b.carrying(0, self.groups, 1, begin) as (group, now, following):
            found = self._of_group(places, v, group)
            scaled, mended = [], []
            for n, (i, r) in enumerate(places):
                at = b.sum(b.product(b.sum(v, r), self.groups), group)
                own = b.number_as_float(arrays.scale, arrays.scales, at)
                scaled.append(b.add_product(b.splat(own), found[n], now[n]))
                of_group = b.ir.load(b.at(arrays.of_x, b.product(i, self.groups), group))
                more = b.ir.fadd(b.number_as_float(arrays.zero, arrays.zeros, at), _TOO_LARGE)
                lost = b.ir.fmul(b.ir.fmul(own, more), of_group)
                mended.append(b.ir.fadd(now[len(places) + n], lost))
            following.extend([*scaled, *mended])
        for n, (i, r) in enumerate(places):
            total = b.ir.fsub(b.total(now[n]), now[len(places) + n])
            b.ir.store(total, b.at(arrays.y, b.product(i, self.count), v, r))

    def _of_group(self, places: list[tuple[int, int]], v: Any, group: Any) -> list[Any]:
        """Multiply by a group of some rows of w; returns sums for each place."""
        b, inner, start = self.b, self.inner, self.b.product(group, self.size)
        rows, taken_rows = (dict.fromkeys(place[n] for place in places) for n in (0, 1))
        with b.carrying(0, self.size, b.width, [b.zeros] * 2 * len(places)) as turn:
            j, now, following = turn
            at = b.sum(start, j)
            taken = {
                r: b.load_pairs(self.arrays.w, b.product(b.sum(v, r), inner), at)
                for r in taken_rows
            }
            own = {
                i: [b.load(self.arrays.x, b.product(2 * i + h, inner), at) for h in (0, 1)]
                for i in rows
            }
            for n, (i, r) in enumerate(places):
                for h in (0, 1):
                    following.append(b.add_product(own[i][h], taken[r][h], now[2 * n + h]))
        return [b.ir.fadd(*now[2 * n : 2 * n + 2]) for n in range(len(places))]


def _arguments(scale: str, zero: str, numbers: int, *more: Any) -> list[Any]:
    """Return the types of x, of_x, w, scale, zero, y, what else there is, and some integers."""
    of_groups = [STORED[dtype].as_pointer() for dtype in (scale, zero)]
    return [POINTER, POINTER, BYTES, *of_groups, POINTER, *more, *[INT] * numbers]
