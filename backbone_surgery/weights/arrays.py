"""Arrays that are read only when they are needed: of variables, of files, or in memory already."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors

from backbone_surgery import hosts
from backbone_surgery.files import reading

_CHUNK, _ALIGNMENT = 2**22, 64
"""In bytes: JAX takes over an array that begins at a multiple of `_ALIGNMENT`, without a copy."""


@dataclass(frozen=True)
class Array:
    """An array that is somewhere, and read only when it is needed.

    Attributes:
        dtype: of the array.
        shape: of the array.
        read: returns it.
        variable: the Keras variable that it is the value of, if any.
        new: whether `read` returns a new one each time.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    variable: Any = None
    new: bool = False

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def of_value(value: np.ndarray) -> Array:
    """Wrap an array that is in memory."""
    return Array(value.dtype, value.shape, lambda: value)


def of_variable(variable: keras.Variable) -> Array:
    """Wrap the value of a variable."""
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    shape = tuple(variable.shape)
    return Array(dtype, shape, lambda: hosts.to_numpy(variable), variable)


def of_file(path: Path) -> dict[str, Array]:
    """Return the arrays of a `.safetensors` file by name; raises any error."""
    file = safetensors.safe_open(str(path), framework="numpy")
    return {name: _of_slice(path, file, name) for name in file.keys()}


def _of_slice(path: Path, file: Any, name: str) -> Array:
    rows = file.get_slice(name)
    shape = tuple(rows.get_shape())
    # A scalar, or an array without numbers, cannot be sliced.
    dtype = (rows[:1] if math.prod(shape) and shape else file.get_tensor(name)).dtype

    def read() -> np.ndarray:
        with reading(path, "transfer_weights", "a `.safetensors` file"):
            if math.prod(shape) * dtype.itemsize <= _CHUNK:
                return file.get_tensor(name)
            value = _empty(shape, dtype)
            step = max(_CHUNK // (math.prod(shape[1:]) * dtype.itemsize), 1)
            for start in range(0, shape[0], step):
                part = slice(start, min(start + step, shape[0]))  # the file refuses to go past
                value[part] = rows[part]
            return value

    return Array(dtype, shape, read, new=True)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new array that JAX can take over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
