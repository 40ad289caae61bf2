"""Arrays in a `.safetensors` file, written and read one at a time.

The format is a length, a JSON header and the bytes of each array in turn. Everything the header
says is checked against the size of the file before an array is allocated, and only one array is
held in memory at a time, however large the file.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from backbone_surgery.errors import RecipeError
from backbone_surgery.weights.jsontext import parse

_NAMES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
DTYPES = {name: np.dtype(dtype) for name, dtype in _NAMES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = frozenset(dtype for name, dtype in DTYPES.items() if name[0] in "FB" and name != "BOOL")

_HEADER = 32 * 2**20
_CHUNK = 2**22
_ALIGNMENT = 64
"""In bytes: a new array that begins at a multiple of it becomes one of JAX without a copy."""


@dataclass(frozen=True)
class Array:
    """An array that is somewhere, and read only when it is needed.

    Attributes:
        dtype: of the array.
        shape: of the array.
        read: returns it, a new one or one that nobody writes to.
        variable: the Keras variable that it is the value of, if it is that of one.
        new: whether `read` always returns a new one.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    variable: Any = None
    new: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def held(value: Any) -> Array:
    """Wrap an array that is in memory already."""
    value = np.asarray(value)
    return Array(value.dtype, value.shape, lambda: value)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> str:
    """Write a `.safetensors` file, reading one array at a time.

    Returns:
        The sha256 of the file, in hexadecimal.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        kind = NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": [*array.shape], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as file:

        def put(data: Any) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for array in arrays.values():
            put(as_bytes(array.read()))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def as_bytes(value: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without copying one that is in C order already."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def read_arrays(opener: Callable[[], IO[bytes]], where: str) -> dict[str, Array]:
    """Read the header of a `.safetensors` file.

    Args:
        opener: opens the file; also later, when an array is read.
        where: named in errors.

    Returns:
        The arrays by name, each to be read when it is needed.

    Raises:
        RecipeError: the header is malformed, or does not describe the file.
    """
    with opener() as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER):
            raise _damaged(where, f"a header of at most {min(max(size - 8, 0), _HEADER)} bytes")
        header = parse(file.read(length), where)
    if not isinstance(header, dict):
        raise _damaged(where, "an object as header")
    header.pop("__metadata__", None)
    start = 8 + length
    found: dict[str, Array] = {}
    spans = []
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(where, name, entry)
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise _damaged(where, f"{end - begin} bytes of {dtype}{list(shape)} for '{name[:60]}'")
        spans.append((begin, end))
        reader = _reader(opener, where, dtype, shape, start + begin)
        found[name] = Array(dtype, shape, reader, new=True)
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _damaged(where, f"arrays that follow one another, with one at byte {position}")
        position = end
    if start + position != size:
        raise _damaged(where, f"a file of {start + position} bytes, as its header says")
    return found


def _entry(where: str, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], list[int]]:
    """Check the form of one entry of a header."""
    if isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = isinstance(shape, list) and isinstance(offsets, list) and [*shape, *offsets]
        numbers = sizes and all(type(n) is int and 0 <= n < 2**62 for n in sizes)
        if numbers and len(offsets) == 2 and len(shape) <= 32 and dtype in [*DTYPES]:
            return DTYPES[dtype], tuple(shape), offsets
    raise _damaged(where, f"a known dtype, a shape and two offsets for '{name[:60]}'")


def _reader(
    opener: Callable[[], IO[bytes]], where: str, dtype: np.dtype, shape: tuple[int, ...], start: int
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        room = np.empty(size + _ALIGNMENT, np.uint8)
        offset = -room.ctypes.data % _ALIGNMENT
        data = room[offset : offset + size]
        with opener() as file:
            file.seek(start)
            if file.readinto(data) != size:  # type: ignore[attr-defined]
                raise _damaged(where, "a file that stays as it is while it is read")
        data.flags.writeable = False
        return data.view(dtype).reshape(shape)

    return read


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, if it is a regular file and no link to one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | _NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        received = "something else"
    except OSError as error:
        received = error.strerror or "an error"
    raise RecipeError(
        f"read at '{path.name}': expected a regular file. Received: {received}. Links are not "
        "followed; copy the file itself."
    )


_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""So that a named pipe in place of a file does not block."""


def all_finite(value: np.ndarray) -> bool:
    """Tell whether an array holds no NaN and no infinity, a few megabytes at a time."""
    if value.dtype not in FLOATS:
        return True
    flat = value.reshape(-1)
    steps = range(0, flat.size, _CHUNK)
    return all(np.isfinite(flat[i : i + _CHUNK]).all() for i in steps)


def _damaged(where: str, expected: str) -> RecipeError:
    return RecipeError(
        f"read at '{where}': expected {expected}. Received a header that says otherwise. The file "
        "is damaged; get it again."
    )
