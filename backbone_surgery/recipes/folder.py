"""Folders that are replaced whole or not at all.

A new folder is filled beside the old one and flushed to the disk. The two are then exchanged in one
step. Where a system cannot do that, the old folder stays and the save is refused.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from backbone_surgery.errors import SurgeryError
from backbone_surgery.files import flush, hidden_beside

_EXCHANGE, _SWAP, _HERE = 2, 2, -100


@contextlib.contextmanager
def new_folder(path: Path, ours: Callable[[str], object]) -> Iterator[Path]:
    """Yield a new folder, which takes the place of `path` when the block ends without an error.

    A process that is killed leaves behind a hidden folder, see `hidden_beside`, at most.

    Raises:
        SurgeryError: see `check_folder`; or there is an old folder, and the system cannot exchange
            two folders.
    """
    path = Path(os.path.abspath(path))
    check_folder(path, ours)
    new = hidden_beside(path)
    new.mkdir()
    try:
        yield new
        for entry in (*new.rglob("*"), new):
            flush(entry)
        if not path.exists():
            os.rename(new, path)
        elif not exchange(new, path):
            raise _refused(path, "a file system that exchanges folders in one step", "another one")
        flush(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_folder(path: Path, ours: Callable[[str], object]) -> None:
    """Check that a folder can be saved to a path: a new one, or one of which all files are `ours`.

    Raises:
        SurgeryError: `path` is a link or a file, has no parent, or holds files of others.
    """
    if not path.parent.is_dir():
        raise _refused(path, "a folder to put it in", "one whose parent does not exist")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "link" if path.is_symlink() else "file"
        raise _refused(path, "a new path or a folder", f"a {kind}")
    entries = [
        p for p in path.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir())
    ]
    others = sorted(name for p in entries if not ours(name := p.relative_to(path).as_posix()))
    if others:
        received = f"one that holds {others[:5]}, which would be lost"
        raise _refused(path, "a new path, or a folder that was saved before", received)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; returns False where the system cannot."""
    if sys.platform not in ("linux", "darwin"):
        return False
    libc, first, second = ctypes.CDLL(None), os.fsencode(a), os.fsencode(b)
    try:
        if sys.platform == "linux":
            return libc.renameat2(_HERE, first, _HERE, second, _EXCHANGE) == 0
        return libc.renamex_np(first, second, _SWAP) == 0
    except AttributeError:
        return False


def _refused(path: Path, expected: str, received: str) -> SurgeryError:
    return SurgeryError(
        f"save at '{path}': expected {expected}. Received {received}. Choose another path."
    )
