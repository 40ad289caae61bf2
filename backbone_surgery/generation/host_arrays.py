"""Arrays of the host that go to an accelerator as one: there a copy costs more than its bytes.

On an H100 each one takes the host about a tenth of a millisecond, however small it is.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_ALIGNED = 4
"""Bytes: each array begins at a multiple of them."""

_LARGE = 2**20
"""Bytes of an array that goes by itself: to copy them on the host takes longer than one more."""


@dataclass(frozen=True)
class Bundle:
    """What a function takes, while arrays of the host lie in one.

    Attributes:
        structure: of its arguments.
        host: for each leaf its shape and dtype, if it lies in that one; else `None`.
    """

    structure: Any
    host: tuple[tuple[tuple[int, ...], np.dtype] | None, ...]

    def opened(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes what `bundle` returned, and calls `run` as it was."""

        def run_opened(numbers: jax.Array, *arrays: list[jax.Array]) -> Any:
            others, offset, leaves = itertools.chain(*arrays), 0, []
            for entry in self.host:
                if entry is None:
                    leaves.append(next(others))
                    continue
                size = math.prod(entry[0]) * entry[1].itemsize
                leaves.append(_array_of(numbers[offset : offset + size], *entry))
                offset += size + -size % _ALIGNED
            return run(*jax.tree.unflatten(self.structure, leaves))

        return run_opened


def bundle(args: tuple) -> tuple[Bundle, tuple]:
    """Put all arrays of NumPy among the arguments of a function into one.

    Args:
        args: trees of arrays, no numbers of Python among them.

    Returns:
        How they lie; and uint8[bytes], followed by a list for each argument of its other arrays:
        those that are on the device, and large ones.
    """
    host: list[tuple[tuple[int, ...], np.dtype] | None] = []
    parts: list[bytes] = []
    arrays: list[list[Any]] = []
    for arg in args:
        arrays.append([])
        for x in jax.tree.leaves(arg):
            if not isinstance(x, jax.Array):
                x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
            if isinstance(x, jax.Array) or x.nbytes >= _LARGE:
                arrays[-1].append(x)
                host.append(None)
                continue
            parts.append(x.tobytes() + bytes(-x.nbytes % _ALIGNED))
            host.append((x.shape, x.dtype))
    numbers = np.frombuffer(b"".join(parts), np.uint8)
    return Bundle(jax.tree.structure(args), tuple(host)), (numbers, *arrays)


def _array_of(data: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Read an array in its bytes, uint8[bytes]."""
    if dtype == np.bool_:
        return data.astype(bool).reshape(shape)
    by_number = data if dtype.itemsize == 1 else data.reshape(-1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(by_number, dtype).reshape(shape)
