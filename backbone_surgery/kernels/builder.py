"""What the kernels are written with: loops and vectors of floats in LLVM's IR."""

import contextlib
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

FLOAT, INT, INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
BYTE = ir.IntType(8)
POINTER, BYTES = FLOAT.as_pointer(), BYTE.as_pointer()

STORED = {"float32": FLOAT, "bfloat16": ir.IntType(16), "int8": BYTE}
"""The numbers that a matrix may be stored as. LLVM sees bfloat16 as its bits."""

LINE = 64
"""Bytes of a line of the cache."""


def per_line(dtype: str) -> int:
    """Return how many numbers a line of the cache holds."""
    return LINE * 8 // (32 if dtype == "float32" else STORED[dtype].width)


class Builder:
    """Writes one function of a module.

    Args:
        module: what the function is added to.
        name: of the function.
        arguments: the types of its arguments.
        width: how many floats a vector has.
        result: the type of its result.
    """

    def __init__(
        self,
        module: ir.Module,
        name: str,
        arguments: list[Any],
        width: int,
        result: Any = None,
    ) -> None:
        result = result or ir.VoidType()
        self.module, self.width = module, width
        self.vector = ir.VectorType(FLOAT, width)
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.ir = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.zeros = ir.Constant(self.vector, [0.0] * width)

    def sum(self, *terms: Any) -> Any:
        """Add integers, some of which may be Python's."""
        total = _int(terms[0])
        for term in terms[1:]:
            total = self.ir.add(total, _int(term))
        return total

    def product(self, *factors: Any) -> Any:
        """Multiply integers, some of which may be Python's."""
        total = _int(factors[0])
        for factor in factors[1:]:
            total = self.ir.mul(total, _int(factor))
        return total

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """Run what is written inside for each i from start to stop."""
        with self.carrying(start, stop, step, []) as (i, _, _):
            yield i

    @contextlib.contextmanager
    def carrying(
        self, start: Any, stop: Any, step: Any, first: list[Any]
    ) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Run what is written inside for each i, handing values from turn to turn.

        Yields:
            i; the values of this turn, and after the loop those of the last; and an empty list, to
            be filled with the values of the next turn.
        """
        b, function = self.ir, self.function
        before = b.block
        head, body, after = (function.append_basic_block(n) for n in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(INT)
        i.add_incoming(_int(start), before)
        values = [b.phi(value.type) for value in first]
        for value, own in zip(values, first, strict=True):
            value.add_incoming(own, before)
        b.cbranch(b.icmp_signed("<", i, _int(stop)), body, after)
        b.position_at_end(body)
        following: list[Any] = []
        yield i, values, following
        i.add_incoming(b.add(i, _int(step)), b.block)
        for value, own in zip(values, following, strict=True):
            value.add_incoming(own, b.block)
        b.branch(head)
        b.position_at_end(after)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Any]:
        """Run what is written inside again and again, until what it calls `done` with is true."""
        turn, after = (self.function.append_basic_block(n) for n in ("turn", "after"))
        self.ir.branch(turn)
        self.ir.position_at_end(turn)

        def done(is_so: Any) -> None:
            following = self.function.append_basic_block("on")
            self.ir.cbranch(is_so, after, following)
            self.ir.position_at_end(following)

        yield done
        self.ir.branch(turn)
        self.ir.position_at_end(after)

    def least(self, x: Any, y: Any) -> Any:
        """Return the smaller of two integers."""
        return self.ir.select(self.ir.icmp_signed("<", x, y), x, y)

    def most(self, x: Any, y: Any) -> Any:
        """Return the larger of two integers."""
        return self.ir.select(self.ir.icmp_signed(">", x, y), x, y)

    def at(self, pointer: Any, *place: Any) -> Any:
        """Return the address of an element."""
        return self.ir.gep(pointer, [self.sum(*place)])

    def load(self, pointer: Any, *place: Any) -> Any:
        """Read a vector of floats."""
        where = self.ir.bitcast(self.at(pointer, *place), self.vector.as_pointer())
        return self.ir.load(where, align=4)

    def load_as_floats(self, dtype: str, pointer: Any, *place: Any) -> Any:
        """Read a vector of numbers that are stored as `dtype`."""
        if dtype == "float32":
            return self.load(pointer, *place)
        kind = ir.VectorType(STORED[dtype], self.width)
        where = self.ir.bitcast(self.at(pointer, *place), kind.as_pointer())
        narrow = self.ir.load(where, align=1)
        whole = ir.VectorType(INT32, self.width)
        if dtype == "int8":
            return self.ir.sitofp(self.ir.sext(narrow, whole), self.vector)
        bits = ir.Constant(whole, [16] * self.width)  # bfloat16 is the upper half of float32
        return self.ir.bitcast(self.ir.shl(self.ir.zext(narrow, whole), bits), self.vector)

    def load_pairs(self, pointer: Any, *place: Any) -> list[Any]:
        """Read a vector of bytes of two numbers each: the first ones, and the second; 8 too large.

        A number of four bits with a sign, whose first bit is turned over, is one from 0 to 15.
        """
        kind, whole = ir.VectorType(BYTE, self.width), ir.VectorType(INT32, self.width)
        where = self.ir.bitcast(self.at(pointer, *place), kind.as_pointer())
        signs, last, four = (ir.Constant(whole, [n] * self.width) for n in (0x88, 15, 4))
        both = self.ir.xor(self.ir.zext(self.ir.load(where, align=1), whole), signs)
        halves = self.ir.and_(both, last), self.ir.lshr(both, four)
        return [self.ir.sitofp(half, self.vector) for half in halves]

    def interleaved(self, x: Any, y: Any) -> list[Any]:
        """Return two vectors of the numbers of x and of y in turn."""
        kind, width = ir.VectorType(INT32, self.width), self.width
        order = [i + n for i in range(width) for n in (0, width)]
        masks = [ir.Constant(kind, order[i : i + width]) for i in (0, width)]
        return [self.ir.shuffle_vector(x, y, mask) for mask in masks]

    def store(self, vector: Any, pointer: Any, *place: Any) -> None:
        """Write a vector of floats."""
        where = self.ir.bitcast(self.at(pointer, *place), self.vector.as_pointer())
        self.ir.store(vector, where, align=4)

    def splat(self, number: Any) -> Any:
        """Return a vector of one number."""
        empty = ir.Constant(self.vector, ir.Undefined)
        mask = ir.Constant(ir.VectorType(INT32, self.width), [0] * self.width)
        return self.ir.shuffle_vector(self.ir.insert_element(empty, number, INT32(0)), empty, mask)

    def scalar(self, pointer: Any, *place: Any) -> Any:
        """Read one float, as a vector of it."""
        return self.splat(self.ir.load(self.at(pointer, *place)))

    def number_as_float(self, dtype: str, pointer: Any, *place: Any) -> Any:
        """Read one number that is stored as `dtype`."""
        number = self.ir.load(self.at(pointer, *place))
        if dtype == "float32":
            return number
        if dtype == "int8":
            return self.ir.sitofp(number, FLOAT)
        return self.ir.bitcast(self.ir.shl(self.ir.zext(number, INT32), INT32(16)), FLOAT)

    def add_product(self, x: Any, y: Any, total: Any) -> Any:
        """Return x · y + total, of vectors."""
        return self.call(f"llvm.fma.v{self.width}f32", self.vector, [x, y, total])

    def total(self, vector: Any) -> Any:
        """Add up the numbers of a vector, in any order."""
        name = f"llvm.vector.reduce.fadd.v{self.width}f32"
        return self.call(name, FLOAT, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))

    def totals(self, vectors: list[Any]) -> Any:
        """Add up the numbers of each vector; there are as many as a vector has numbers."""
        kind = ir.VectorType(INT32, self.width)
        even, odd = (ir.Constant(kind, list(range(i, 2 * self.width, 2))) for i in (0, 1))
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                self.ir.fadd(self.ir.shuffle_vector(*x, even), self.ir.shuffle_vector(*x, odd))
                for x in pairs
            ]
        return vectors[0]

    def prefetch(self, pointer: Any, *place: Any) -> None:
        """Ask for what will be read soon, into the second cache; it may lie beyond the array."""
        where = self.ir.bitcast(self.at(pointer, *place), BYTES)
        self.call("llvm.prefetch.p0", ir.VoidType(), [where, INT32(0), INT32(2), INT32(1)])

    def call(self, name: str, result: Any, arguments: list[Any], **options: Any) -> Any:
        """Call a function by its name."""
        known = self.module.globals.get(name)
        if known is None:
            types = [argument.type for argument in arguments]
            known = ir.Function(self.module, ir.FunctionType(result, types), name)
        return self.ir.call(known, arguments, **options)


def _int(x: Any) -> Any:
    return INT(x) if isinstance(x, int) else x
