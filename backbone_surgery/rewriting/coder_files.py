"""Files of sparse coders: what is checked of those of autoencoders and transcoders alike."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import STORABLE, as_path, read_arrays, read_json, reading
from backbone_surgery.numbers import is_int

_MOST = 2**20
"""Bytes of a file of settings."""

Read = TypeVar("Read")
Axes = Mapping[str, tuple[str, ...]]
"""Names of the axes of arrays, by name of the array; an axis is of one size in all of them."""


class CoderFile:
    """The file of arrays of one coder, with the settings beside it.

    Args:
        path: the file.
        operation: the name of the rewrite that reads it, for errors.
    """

    def __init__(self, path: Path, operation: str) -> None:
        self.path, self.operation = path, operation

    def refused(
        self, expected: str, received: Any, advice: str = "Use another one."
    ) -> SurgeryError:
        """Return the error for what the file, or its settings, should not say."""
        return SurgeryError(
            f"{self.operation} at '{self.path}': expected {expected}. Received {shown(received)}. "
            f"{advice}"
        )

    def settings(self, name: str, optional: bool = False) -> dict[str, Any]:
        """Read the settings of this name; none where the file is missing and may be."""
        path = self.path.parent / name
        return dict(read_json(path, _MOST)) if path.is_file() or not optional else {}

    def stored(self) -> dict[str, np.ndarray]:
        """Read all arrays as they are."""
        if self.path.suffix != ".npz":
            return read_arrays(self.path)
        with np.load(self.path, allow_pickle=False) as arrays:
            return dict(arrays)

    def checked(self, stored: Mapping[str, np.ndarray], axes: Axes) -> dict[str, np.ndarray]:
        """Return the named arrays as float32; others, shapes that differ and NaN are refused."""
        shapes = {name: list(array.shape) for name, array in stored.items()}
        sizes: dict[str, int] = {}
        for name, names in axes.items():
            sizes = dict(zip(names, shapes.get(name, []), strict=False)) | sizes
        if shapes != {name: [sizes.get(axis) for axis in names] for name, names in axes.items()}:
            wanted = ", ".join(f"{name} [{', '.join(names)}]" for name, names in axes.items())
            advice = "Get the file again, or use another one."
            raise self.refused(f"arrays {wanted}, and no others", shapes, advice)
        odd = {n: str(array.dtype) for n, array in stored.items() if array.dtype not in STORABLE}
        if odd:
            advice = "Save them as float32: `.npz` files do not keep bfloat16, and hold it as |V2."
            raise self.refused("arrays of integers or floats that NumPy knows", odd, advice)
        with np.errstate(over="ignore"):
            arrays = {name: np.asarray(stored[name], "float32") for name in axes}
        wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
        if wrong:
            advice = "Get the file again, or use another one."
            raise self.refused("arrays of finite numbers", f"others in {', '.join(wrong)}", advice)
        return arrays

    def flag(self, settings: Mapping[str, Any], name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = settings.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(f"`{name}` to be true or false", value)
        return value

    def check_sizes(self, settings: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Refuse settings of other sizes than those of the arrays."""
        for name, size in sizes.items():
            if settings.get(name) not in (None, size):
                raise self.refused(f"`{name}` {size}, the size of the arrays", settings[name])

    def count(self, k: Any, latents: int) -> int:
        """Check how many features are kept."""
        if not is_int(k) or not 0 < k <= latents:
            raise self.refused(f"`k` from 1 to {latents}, the number of latents", k)
        return int(k)


def read_coder(
    path: Any,
    operation: str,
    kind: str,
    readers: Mapping[str, Callable[[CoderFile], Read]],
    others: Mapping[str, Callable[[CoderFile], Read]],
) -> Read:
    """Read a coder by the reader of its file.

    Args:
        path: a folder, in which one of the files tells the format; or a file.
        operation: the name of the rewrite that reads it.
        kind: what it reads, for errors, such as "an autoencoder".
        readers: by name of the file in a folder.
        others: by the ending of a file that is named itself.

    Raises:
        SurgeryError: files, arrays or settings that are missing or that cannot be run.
    """
    if not path:
        raise SurgeryError(
            f"{operation}: expected the path of a folder or file, or `layers`. Received neither. "
            "Pass that of one layer."
        )
    folder = as_path(path, operation)
    found = [(folder / name, read) for name, read in readers.items() if (folder / name).is_file()]
    own = readers.get(folder.name) or others.get(folder.suffix)
    if own is not None and folder.is_file():
        found = [(folder, own)]
    if len(found) != 1:
        names = " and ".join(file.name for file, _ in found)
        there = f"a folder with {names or 'none of them'}" if folder.is_dir() else "another file"
        received = there if folder.exists() else "a path where nothing is"
        raise SurgeryError(
            f"{operation} at '{path}': expected a folder with one of {', '.join(readers)}, or a "
            f"file that ends with {' or '.join(others)}. Received {received}. Pass the folder or "
            f"file of {kind} of one layer."
        )
    file, read = found[0]
    with reading(folder, operation, f"{kind} with its settings beside it"):
        return read(CoderFile(file, operation))
