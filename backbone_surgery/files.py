"""Files: read whole or refused in words, and written whole or not at all."""

import contextlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from backbone_surgery.errors import SurgeryError, shown

FLOATS = frozenset(map(np.dtype, ("float16", "float32", "float64", ml_dtypes.bfloat16)))
INTEGERS = frozenset(
    np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)
)
STORABLE = FLOATS | INTEGERS | {np.dtype(bool)}
"""The dtypes that `.safetensors` files and NumPy both know."""

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


def found_at(path: Path) -> str:
    """Return what lies at a path, as an error shows it.

    Examples:
        >>> found_at(Path("/")), found_at(Path("/nowhere.csv"))
        ('a folder', "'nowhere.csv', which is not there")
    """
    if os.path.isdir(path):  # `Path.is_dir` raises where a name is too long
        return "a folder"
    return f"'{path.name}'" if os.path.exists(path) else f"'{path.name}', which is not there"


@contextlib.contextmanager
def reading(
    place: object,
    operation: str,
    expected: str,
    kind: type[SurgeryError] = SurgeryError,
    advice: str = "It is damaged, or was made by another release; get it again.",
) -> Iterator[None]:
    """Raise one error for whatever is raised inside but a `SurgeryError`: readers raise anything.

    Args:
        place: what is read, such as a path.
        operation: named in the error, such as `"load_recipe"`.
        expected: what is to be there, such as `"a JSON file"`.
        kind: class of the error.
        advice: what to do about it.
    """
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {words}"
        received = "none" if isinstance(error, FileNotFoundError) else "another one"
        raise kind(
            f"{operation} at '{place}': expected {expected}. Received {received} ({reason}). "
            f"{advice}"
        ) from error


@contextlib.contextmanager
def writing(
    place: object,
    operation: str,
    advice: str = "Make room for it, make the place writable, or choose another path.",
) -> Iterator[None]:
    """Say in words that the system does not write what is written inside, and why.

    Args:
        place: what is written, such as a path.
        operation: named in the error, such as `"save_recipe"`.
        advice: what to do about it.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise SurgeryError(
            f"{operation} at '{place}': expected a place that can be written. Received an error: "
            f"{reason}. {advice}"
        ) from error


def as_path(path: Any, operation: str) -> Path:
    """Return a path as a `Path`; `operation` is named in the error."""
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        return Path(path)
    raise SurgeryError(
        f"{operation}: expected a path. Received {shown(path)} of type {type(path).__name__}. Pass "
        "a string or a `pathlib.Path`."
    )


def picture_path(path: Any, operation: str, *others: str) -> Path:
    """Return the path of a picture to be drawn, or of a file with one of some other endings."""
    found, endings = as_path(path, operation), (*_PICTURES, *others)
    if found.suffix.lower() not in endings:
        raise SurgeryError(
            f"{operation} at '{path}': expected a file that ends in one of {', '.join(endings)}. "
            f"Received the ending {shown(found.suffix)}. Choose such a name."
        )
    check_folder(found, operation)
    return found


def check_folder(path: Path, operation: str) -> None:
    """Refuse a path that no file can be written to: its folder is missing, or it is a folder."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.parent.is_dir():
        raise SurgeryError(
            f"{operation} at '{path}': expected a file in a folder that exists. Received the "
            f"folder '{target.parent}'. Make it first, or choose another."
        )
    if path.is_dir():
        raise SurgeryError(
            f"{operation} at '{path}': expected the name of a file. Received a folder. Choose "
            "another name."
        )
    check_writable(target.parent, operation)


def check_writable(folder: Path, operation: str) -> None:
    """Refuse a folder whose files this user cannot list and replace."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise SurgeryError(
            f"{operation} at '{folder}': expected a folder that can be read and written to. "
            "Received one that can not. Change its permissions, or choose another."
        )


def save_picture(figure: Any, path: Path, operation: str, **options: Any) -> None:
    """Save a figure of matplotlib in one step, see `replace_file`.

    Args:
        figure: the figure.
        path: of the file, from `picture_path`.
        operation: named in the error.
        **options: for `Figure.savefig`.
    """
    kind = path.suffix[1:].lower()
    with writing(path, operation):
        replace_file(path, lambda part: figure.savefig(part, format=kind, **options))


def read_json(path: Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes, without NaN or infinity; raises any error."""
    with open(path, "rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"more than {most} bytes")
    return json.loads(text.decode("utf-8"), parse_constant=_refuse)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, as `object_pairs_hook`: of two values of a name one would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shown(name)} {times} times")
    return made


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a `.safetensors` file; raises any error."""
    with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step: `path` then holds all of it, or still what it held before.

    A process that is killed leaves behind a hidden file, see `hidden_beside`, at most.

    Args:
        path: of the file; a link is followed.
        write: writes a new file of the path it is given.

    Raises:
        SurgeryError: see `target_of`.
        OSError: the system does not write the file; `writing` says so in words.
    """
    path = target_of(path)
    part = hidden_beside(path)
    try:
        write(part)
        put_in_place(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def put_in_place(part: Path, path: Path) -> None:
    """Give a file that is whole the name of one that may be there, in one step."""
    flush(part)
    os.replace(part, path)
    flush(path.parent)


def target_of(path: Path) -> Path:
    """Return the file that a path stands for, with links followed.

    Raises:
        SurgeryError: what is there is no regular file, but a folder, a pipe or a device.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not target.is_file():
        raise SurgeryError(
            f"save at '{path}': expected a new file, or a regular one to replace. Received a "
            "folder, a pipe or a device. Choose another path."
        )
    return target


def hidden_beside(path: Path) -> Path:
    """Return a new hidden name in the same folder, `.backbone_surgery-<random>.new`.

    It does not depend on the name of the path, which may be as long as a name can be.
    """
    return path.with_name(f".backbone_surgery-{secrets.token_hex(6)}.new")


def is_part(name: str) -> bool:
    """Tell whether a name is one of `hidden_beside`: of a file that was being written."""
    return re.fullmatch(r"\.backbone_surgery-[0-9a-f]{12}\.new", name) is not None


def flush(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} in place of a number")
