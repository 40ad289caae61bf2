"""Ctrl-C, where Python waits for a compiled program and would notice only when that is done."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

INTERRUPTED = 130
"""The exit status of what is interrupted, in a shell's count."""

_GRACE = 2.0
"""Seconds for a command to end by itself."""


_last_words: list[str] = []
"""What is said to whom interrupts."""


@contextmanager
def resumable() -> Iterator[None]:
    """Have an interrupt say that nothing is lost of what runs inside.

    After an error it still does: an interrupt is one, and is told of when it got through.
    """
    _last_words.append("note: interrupted; the same command goes on where it was.")
    yield
    _last_words.clear()


def end_when_interrupted() -> None:
    """Have Ctrl-C end the process soon, also while a program compiles or runs.

    Where others handle the signal, as a server does, it is theirs. Call this in the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `startup` left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard, told), daemon=True).start()


def end_at_once() -> None:
    """End the process without the tear-down of Python, with the status of an interrupted one.

    A compiled program may still run on other threads, and would read what Python has freed.
    """
    sys.stdout.flush()
    print(*_last_words, sep="\n", end="\n" * len(_last_words), file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _watch(heard: socket.socket, told: socket.socket) -> None:
    """Wait for the signal; `told` is kept open meanwhile."""
    while signals := heard.recv(64):
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours and signal.SIGINT in signals:
            time.sleep(_GRACE)
            Console().show_cursor()  # which a bar of progress hides
            end_at_once()
