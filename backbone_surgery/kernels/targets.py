"""The targets of custom calls: which kernel each runs, and what each part of a call works on."""

from typing import Any

from llvmlite import ir

from backbone_surgery.kernels import attention, packed_products, products
from backbone_surgery.kernels.builder import INT, LINE, Builder
from backbone_surgery.kernels.handler import Body, Frame
from backbone_surgery.kernels.processor import register

_GROUPS = {16: 8, 8: 4}
"""By the floats of a vector, how many rows of a matrix at once leave room in the registers."""

_ROWS = {16: 8, 8: 4}
"""By the floats of a vector, how many rows of x are multiplied at once with two of a matrix."""


def columns_target(dtype: str, rows: int, whole: bool, wide: bool) -> str:
    """Register x, [batch, rows, K], by w, [batch, K, columns], to [pieces, batch, rows, columns].

    Args:
        dtype: of w.
        rows: of x.
        whole: whether a part multiplies whole matrices, and there is one piece; else each part
            multiplies a piece of each matrix, and the pieces are to be added up.
        wide: whether the sums for one row of x are more than stay in the first cache.
    """

    def write(module: ir.Module, width: int) -> Body:
        group = _GROUPS[width]
        if rows == 1:
            at_once = group if wide else 4 if dtype == "int8" else 1
            kernel = products.write_stream(module, width, dtype, at_once)
        else:
            kernel = products.write_groups(module, width, dtype, rows, group)

        def body(b: Builder, frame: Frame, part: Any) -> None:
            x, w, y = frame.arguments(dtype)
            batch, depth, columns = (frame.dimension(1, axis) for axis in range(3))
            if whole:
                begin, end = _share(b, batch, part, frame.parts)
                first, stop = INT(0), depth
            else:
                begin, end = INT(0), batch
                first, stop = _share(b, depth, part, frame.parts, group)
                y = b.at(y, b.product(part, batch, rows, columns))
            with b.loop(begin, end) as i:
                own = b.at(x, b.product(i, rows, depth)), b.at(w, b.product(i, depth, columns))
                out = b.at(y, b.product(i, rows, columns))
                b.ir.call(module.globals[kernel], [*own, out, first, stop, depth, columns])

        return body

    name = f"columns_{dtype}_{rows}_{'whole' if whole else 'pieces'}{'_wide' if wide else ''}"
    return register(name, write)


def dots_target(dtype: str, rows: int) -> str:
    """Register x, [rows, K], by the rows of w, [n, K] of a dtype, to [rows, n]."""

    def write(module: ir.Module, width: int) -> Body:
        kernel = products.write_dots(module, width, dtype, rows, _ROWS[width])

        def body(b: Builder, frame: Frame, part: Any) -> None:
            count, depth = frame.dimension(1, 0), frame.dimension(1, 1)
            own = _share(b, count, part, frame.parts, 2)
            b.ir.call(module.globals[kernel], [*frame.arguments(dtype), *own, depth, count])

        return body

    return register(f"dots_{dtype}_{rows}", write)


def scores_target(dtype: str, heads: int, queries: int, size: int) -> str:
    """Register queries, [batch, heads, queries, size], by keys, to [batch, heads, queries, slots].

    The keys are of a dtype. The third argument says which slots are read, int32[2].
    """

    def write(module: ir.Module, width: int) -> Body:
        kernel = attention.write_scores(module, width, dtype, heads, queries, size)

        def body(b: Builder, frame: Frame, part: Any) -> None:
            query, cache, y = frame.arguments(dtype)
            batch, slots = (frame.dimension(0, axis, of_result=True) for axis in (0, 3))
            first, stop = frame.bounds()
            begin, end = _share(b, b.ir.sub(stop, first), part, frame.parts)
            with b.loop(0, batch) as row:
                out = b.at(y, b.product(row, heads * queries, slots))
                with b.ir.if_then(b.ir.icmp_signed("==", part, INT(0))):
                    attention.write_zeros(b, out, heads * queries, slots, first, stop)
                own = (
                    b.at(query, b.product(row, heads * queries * size)),
                    b.at(cache, b.product(row, slots, heads * size)),
                )
                seen = b.sum(first, begin), b.sum(first, end)
                b.ir.call(module.globals[kernel], [*own, out, *seen, slots])

        return body

    return register(f"scores_{dtype}_{heads}_{queries}_{size}", write)


def mix_target(dtype: str, heads: int, queries: int, size: int) -> str:
    """Register shares, [batch, heads, queries, slots], by values, to [parts, ..., queries, size].

    The values are of a dtype. The third argument says which slots are read, int32[2]; the parts are
    to be added up.
    """

    def write(module: ir.Module, width: int) -> Body:
        kernel = attention.write_mix(module, width, dtype, heads, queries, size)

        def body(b: Builder, frame: Frame, part: Any) -> None:
            shares, cache, y = frame.arguments(dtype)
            batch, slots = frame.dimension(0, 0), frame.dimension(0, 3)
            first, stop = frame.bounds()
            begin, end = _share(b, b.ir.sub(stop, first), part, frame.parts)
            with b.loop(0, batch) as row:
                at = b.sum(b.product(part, batch), row)
                own = (
                    b.at(shares, b.product(row, heads * queries, slots)),
                    b.at(cache, b.product(row, slots, heads * size)),
                    b.at(y, b.product(at, heads * queries * size)),
                )
                seen = b.sum(first, begin), b.sum(first, end)
                b.ir.call(module.globals[kernel], [*own, *seen, slots])

        return body

    return register(f"mix_{dtype}_{heads}_{queries}_{size}", write)


def packed_target(pairs: str, scale: str, zero: str, rows: int) -> str:
    """Register x by matrices of four bits, and room for sums of one.

    Its arguments are x, its sums over groups, the matrix, the scales and the zero points; see
    `packed_products`. A matrix that is "turned" gives [rows, outputs], and needs no such room. Of
    others several may follow each other, of as many rows each, and give [matrices, rows, outputs].

    Args:
        pairs: see `Packed`.
        scale: dtype of the scales; `zero` that of the zero points.
        zero: see `scale`.
        rows: of x.
    """
    of_rows = pairs == "turned"

    def write(module: ir.Module, width: int) -> Body:
        if of_rows:
            most = _ROWS[width] // 2
            kernel = packed_products.write_dots(module, width, scale, zero, rows, most)
        else:
            of_matrix = pairs, scale, zero, rows, _GROUPS[width]
            kernel = packed_products.write_columns(module, width, *of_matrix)

        def body(b: Builder, frame: Frame, part: Any) -> None:
            data = frame.arguments("float32", "int8", scale, zero, results=1 if of_rows else 2)
            groups = frame.dimension(1, 2)
            if of_rows:
                count, depth = (frame.dimension(2, axis) for axis in (0, 1))
                own = _share(b, count, part, frame.parts, 2)
                size = b.ir.sdiv(depth, groups)
                b.ir.call(module.globals[kernel], [*data, *own, size, groups, count])
            else:
                _write_matrices(b, frame, part, module.globals[kernel], data, groups, rows)

        return body

    return register(f"packed_{pairs}_{scale}_{zero}_{rows}", write)


def _write_matrices(
    b: Builder, frame: Frame, part: Any, kernel: Any, data: list[Any], groups: Any, rows: int
) -> None:
    """Multiply by some columns of all matrices of four bits that follow each other."""
    x, of_x, w, scale, zero, y, sums = data
    matrices, outputs = (frame.dimension(0, axis, of_result=True) for axis in (0, 2))
    depth, count = (frame.dimension(2, axis) for axis in (0, 1))
    depth, stretch = b.ir.sdiv(depth, matrices), b.ir.sdiv(count, frame.dimension(0, 0))
    shared = b.ir.sdiv(b.product(groups, matrices), frame.dimension(3, 0))
    own = _share(b, count, part, frame.parts, LINE)
    with b.loop(0, matrices) as i:
        of_matrix = x, of_x, b.at(w, b.product(i, depth, count)), scale, zero
        out = b.at(y, b.product(i, rows, outputs)), sums
        sizes = b.ir.sdiv(depth, groups), groups, count, stretch, b.product(i, groups), shared
        b.ir.call(kernel, [*of_matrix, *out, *own, *sizes])


def _share(b: Builder, total: Any, part: Any, parts: Any, multiple: int = 1) -> tuple[Any, Any]:
    """Return where a part begins and ends, in whole multiples."""
    units = b.ir.sdiv(b.sum(total, multiple - 1), INT(multiple))

    def cut(number: Any) -> Any:
        return b.least(b.product(b.ir.sdiv(b.product(units, number), parts), multiple), total)

    return cut(part), cut(b.sum(part, 1))
