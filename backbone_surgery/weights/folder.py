"""Folders that are written whole or not at all.

A new folder is filled next to the place where it belongs, flushed to the disk, and then takes that
place in one step: a rename, or an exchange of the two where there is an old one. Where the system
cannot exchange two folders, the old one is first set aside under a fixed name, from where `recover`
brings it back should the process end right there.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from backbone_surgery.errors import SurgeryError

_EXCHANGE, _SWAP, _HERE = 2, 2, -100


@contextlib.contextmanager
def new_folder(path: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """Fill a new folder, which takes the place of `path` when the block ends without an error.

    A process that is killed leaves behind a hidden folder `.<name>.<random>.new` at most.

    Args:
        path: where the folder is to be. An old one there is replaced.
        ours: tells of the path of a file within an old folder whether it may be replaced.

    Yields:
        The folder to fill.

    Raises:
        SurgeryError: `path` is a link or a file, holds entries of others, or has no parent.
    """
    path = Path(os.path.abspath(path))
    recover(path)
    _check_target(path, ours)
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    new.mkdir()
    try:
        yield new
        _flush(new)
        _put(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def recover(path: Path) -> None:
    """Bring back an old folder that was set aside by a process that ended before the new one came.

    Args:
        path: where the folder should be.
    """
    path = Path(os.path.abspath(path))
    if not path.name:
        return
    aside = _aside(path)
    if aside.is_dir() and not os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            os.rename(aside, path)


def _check_target(path: Path, ours: Callable[[str], bool]) -> None:
    if not path.parent.is_dir():
        raise SurgeryError(
            f"save at '{path}': expected a folder to put it in. Received one whose parent does not "
            "exist. Make it first."
        )
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise SurgeryError(
            f"save at '{path}': expected a new path or a folder. Received a "
            f"{'link' if path.is_symlink() else 'file'}. Choose another path."
        )
    others = sorted(name for name in _entries(path) if not ours(name))
    if others:
        raise SurgeryError(
            f"save at '{path}': expected a new path, or a folder that was saved before. Received "
            f"one that holds {others[:5]}, which would be lost. Choose another path."
        )


def _entries(folder: Path) -> list[str]:
    """Return the paths, within a folder, of all files, links and empty folders in it."""
    found = []
    for root, folders, files in os.walk(folder):
        paths = [Path(root, name) for name in [*folders, *files]]
        found += [p for p in paths if p.is_symlink() or not p.is_dir() or not any(p.iterdir())]
    return [p.relative_to(folder).as_posix() for p in found]


def _flush(folder: Path) -> None:
    """Have the system write all files and folders to the disk."""
    for root, _, files in os.walk(folder):
        for name in [*files, "."]:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _put(new: Path, path: Path) -> None:
    """Put a new folder in its place. Afterwards `new` holds the old one, if it still exists."""
    if not path.exists():
        os.rename(new, path)
    elif not exchange(new, path):
        aside = _aside(path)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        os.rename(new, path)
        shutil.rmtree(aside, ignore_errors=True)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; returns False where the system cannot."""
    if sys.platform not in ("linux", "darwin"):
        return False
    libc = ctypes.CDLL(None)
    first, second = os.fsencode(a), os.fsencode(b)
    try:
        if sys.platform == "linux":
            return libc.renameat2(_HERE, first, _HERE, second, _EXCHANGE) == 0
        return libc.renamex_np(first, second, _SWAP) == 0
    except AttributeError:
        return False


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
