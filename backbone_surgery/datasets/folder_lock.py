"""A lock on a folder: several hold it together, or one holds it alone."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """A lock on a folder that is open, see `lock_on`.

    Attributes:
        is_real: whether the system has such locks. Where it has not, nobody is kept out.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_real = fcntl is not None

    def take(self, alone: bool) -> bool:
        """Hold it alone, or together with others, instead of what was held before.

        Returns:
            Whether it is held. Where the system has no locks on folders, it always is.
        """
        if fcntl is None:
            return True
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some file systems of networks have none
            self.is_real = False
        return True


@contextlib.contextmanager
def lock_on(folder: Path) -> Iterator[FolderLock]:
    """Open a folder for a lock, which the system lets go of when the process ends, too."""
    if fcntl is None:
        yield FolderLock(-1)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield FolderLock(descriptor)
    finally:
        os.close(descriptor)
