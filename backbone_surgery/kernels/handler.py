"""Handlers: what XLA calls for a custom call, as LLVM's IR.

XLA calls a handler with a frame that points to its arguments. The handlers here read the frame
themselves, in the layout of `xla/ffi/api/c_api.h`, which comes with jaxlib. That interface is kept
stable: its structs only grow, at their ends.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from backbone_surgery.kernels.builder import BYTES, INT, INT32, STORED, Builder

# Where fields lie, in words of 8 bytes. Of the frame:
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS, _ATTRIBUTES = 1, 2, 3, 9, 14, 20
# of a buffer, of a number among the attributes, and of the table of functions:
_DATA, _DIMENSIONS, _VALUE, _DESTROY_ERROR, _SCHEDULE = 3, 5, 1, 8, 17
# of what is exchanged when a handler is registered:
_METADATA, _VERSION_OF_API, _VERSION, _TRAITS = 3, 4, 3, 4
# and of what the threads of one call share.
_THREADS, _NEXT, _DONE, _FRAME, _PARTS, _SHARED = range(6)

_WORDS = INT.as_pointer()
_CALLED = ir.FunctionType(BYTES, [BYTES]).as_pointer()

Body = Callable[[Builder, "Frame", Any], None]
"""Writes one part of a call, given the frame and the number of the part."""


class Frame:
    """What a handler is called with, as values of LLVM's IR.

    Args:
        builder: of the function that reads it.
        address: of the frame.
    """

    def __init__(self, builder: Builder, address: Any) -> None:
        self.builder = builder
        self.words = builder.ir.bitcast(address, _WORDS)

    def word(self, pointer: Any, place: int) -> Any:
        """Read a word of a struct."""
        return self.builder.ir.load(self.builder.ir.gep(pointer, [INT(place)]))

    def follow(self, pointer: Any, *places: int) -> Any:
        """Read a pointer in a struct, one in what that points to, and so on."""
        for place in places:
            pointer = self.builder.ir.inttoptr(self.word(pointer, place), _WORDS)
        return pointer

    def data(self, kind: int, number: int, dtype: str = "float32") -> Any:
        """Return the address of the numbers of an argument or a result."""
        address = self.follow(self.words, kind, number, _DATA)
        return self.builder.ir.bitcast(address, STORED[dtype].as_pointer())

    def dimension(self, number: int, axis: int, of_result: bool = False) -> Any:
        """Return the size of an axis of an argument or a result."""
        kind = _RESULTS if of_result else _ARGUMENTS
        return self.word(self.follow(self.words, kind, number, _DIMENSIONS), axis)

    @property
    def parts(self) -> Any:
        """Into how many parts the call is cut: its only attribute."""
        return self.word(self.follow(self.words, _ATTRIBUTES, 0, _VALUE), 0)

    def arguments(self, *dtypes: str, results: int = 1) -> list[Any]:
        """Return the addresses of the first argument, of others, of some dtypes, and of results."""
        given = [self.data(_ARGUMENTS, i, x) for i, x in enumerate(("float32", *dtypes))]
        return [*given, *(self.data(_RESULTS, i) for i in range(results))]

    def bounds(self) -> list[Any]:
        """Return the two numbers of the third argument, int32[2]."""
        words = self.builder.ir.bitcast(self.data(_ARGUMENTS, 2), INT32.as_pointer())
        read = [self.builder.ir.load(self.builder.ir.gep(words, [INT(i)])) for i in (0, 1)]
        return [self.builder.ir.sext(number, INT) for number in read]


def write_handler(module: ir.Module, width: int, name: str, body: Body) -> None:
    """Write a handler that runs what `body` writes, for each of the call's `parts`.

    The parts are claimed one by one, by the thread that XLA calls and by threads of its pool, so
    nothing waits for a thread that may never come. What they share lies on the heap, since a
    thread may come late.

    Args:
        module: to add it to.
        width: floats of a vector.
        name: of the handler. Its calls have the attribute `parts`, int64, and no other.
        body: writes one part.
    """
    task = _write_task(module, width, f"{name}_task", body)
    b = Builder(module, name, [BYTES], width, result=BYTES)
    frame = Frame(b, b.function.args[0])
    _answer(b, frame)
    shared = b.call("malloc", BYTES, [INT(8 * _SHARED)])
    words = b.ir.bitcast(shared, _WORDS)
    first = {_THREADS: frame.parts, _NEXT: INT(0), _DONE: INT(0), _PARTS: frame.parts}
    first[_FRAME] = b.ir.ptrtoint(b.function.args[0], INT)
    for place, value in first.items():
        b.ir.store(value, b.ir.gep(words, [INT(place)]))
    _ask_for_threads(b, frame, words, task)
    _claim(b, words, body)
    with b.waiting() as done:
        finished = b.ir.load_atomic(b.ir.gep(words, [INT(_DONE)]), "seq_cst", 8)
        done(b.ir.icmp_signed(">=", finished, frame.parts))
        b.call("sched_yield", INT32, [])
    _let_go(b, words)
    b.ir.ret(ir.Constant(BYTES, None))


def _answer(b: Builder, frame: "Frame") -> None:
    """When XLA registers a handler, tell it that it was made for XLA's version of the interface."""
    with b.ir.if_then(b.ir.icmp_unsigned("!=", frame.word(frame.words, _EXTENSION), INT(0))):
        metadata = frame.follow(frame.words, _EXTENSION, _METADATA)
        version = frame.word(frame.follow(frame.words, _API), _VERSION_OF_API)
        b.ir.store(version, b.ir.gep(metadata, [INT(_VERSION)]))
        traits = b.ir.bitcast(b.ir.gep(metadata, [INT(_TRAITS)]), INT32.as_pointer())
        b.ir.store(INT32(0), traits)
        b.ir.ret(ir.Constant(BYTES, None))


def _ask_for_threads(b: Builder, frame: "Frame", words: Any, task: Any) -> None:
    """Ask the pool of XLA for a thread for each part but one; those that it refuses do not come."""
    api = frame.follow(frame.words, _API)
    schedule, destroy = (
        b.ir.inttoptr(frame.word(api, place), _CALLED) for place in (_SCHEDULE, _DESTROY_ERROR)
    )
    context, *others = (
        frame.word(frame.words, _CONTEXT),
        b.ir.ptrtoint(task, INT),
        b.ir.ptrtoint(words, INT),
    )
    with b.loop(1, frame.parts):
        error = b.ir.ptrtoint(b.ir.call(schedule, [_struct(b, [context, *others])]), INT)
        with b.ir.if_then(b.ir.icmp_unsigned("!=", error, INT(0))):
            b.ir.call(destroy, [_struct(b, [error])])
            b.ir.atomic_rmw("sub", words, INT(1), "seq_cst")


def _write_task(module: ir.Module, width: int, name: str, body: Body) -> Any:
    """Write what a thread of the pool runs: claim parts, then let go of what is shared."""
    b = Builder(module, name, [BYTES], width)
    words = b.ir.bitcast(b.function.args[0], _WORDS)
    _claim(b, words, body)
    _let_go(b, words)
    b.ir.ret_void()
    return b.function


def _claim(b: Builder, words: Any, body: Body) -> None:
    """Run parts until none is left; the frame is there as long as one is."""
    with b.waiting() as done:
        part = b.ir.atomic_rmw("add", b.ir.gep(words, [INT(_NEXT)]), INT(1), "seq_cst")
        # What the frame says is read where a part was claimed, and nowhere else.
        parts = b.ir.load(b.ir.gep(words, [INT(_PARTS)]))
        done(b.ir.icmp_signed(">=", part, parts))
        own = b.ir.inttoptr(b.ir.load(b.ir.gep(words, [INT(_FRAME)])), BYTES)
        body(b, Frame(b, own), part)
        b.ir.atomic_rmw("add", b.ir.gep(words, [INT(_DONE)]), INT(1), "seq_cst")


def _let_go(b: Builder, words: Any) -> None:
    """Free what is shared where no other thread can look at it."""
    before = b.ir.atomic_rmw("sub", words, INT(1), "seq_cst")
    with b.ir.if_then(b.ir.icmp_signed("==", before, INT(1))):
        b.call("free", ir.VoidType(), [b.ir.bitcast(words, BYTES)])


def _struct(b: Builder, fields: list[Any]) -> Any:
    """Put a struct of the interface on the stack: its size, no extension, and the fields."""
    words = [INT(8 * (len(fields) + 2)), INT(0), *fields]
    with b.ir.goto_entry_block():
        place = b.ir.alloca(INT, size=len(words))
    for i, word in enumerate(words):
        b.ir.store(word, b.ir.gep(place, [INT(i)]))
    return b.ir.bitcast(place, BYTES)
