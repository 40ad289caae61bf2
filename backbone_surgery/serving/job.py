"""A job: one request on its way through the engine, and what has come of it."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from backbone_surgery.contexts import setting
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.serving.sampling import Sampling

_log = logging.getLogger(__name__)

Reason = Literal["stop", "length", "cancelled", "error"]


class RequestError(SurgeryError):
    """What a request asked for went wrong, while others go on."""


_untold: ContextVar["list[Job] | None"] = ContextVar("untold", default=None)
"""Jobs that changed, where listeners are called later."""


@contextlib.contextmanager
def listeners_later() -> Iterator[None]:
    """Call the listeners of jobs that change inside at the end, once all of them have changed."""
    jobs: list[Job] = []
    try:
        with setting({_untold: jobs}):
            yield
    finally:
        with contextlib.ExitStack() as told:  # all of them, whatever a listener raises
            for job in reversed(jobs):
                told.callback(job.tell)


@dataclass(eq=False)
class Job:
    """What a request asks for, and its text so far.

    Attributes:
        prompt: int32[length], its token ids.
        budget: new tokens at most.
        stops: what ends it.
        seeds: uint32[1, 2], its random state.
        controls: `{input name: array[1, ...]}`.
        sampling: how its tokens are chosen.
        table: of its response format, if it has one.
        captures: whether to keep what the graph captures.
        prompt_logprobs: whether to note the log-probabilities of its prompt.
        changed: told of every change below.
        new: int32[tokens], the new tokens so far.
        reason: why there will be no more; `None` while there will.
        error: what went wrong, if anything did.
        notes: log-probabilities of its steps, one entry for each time that some were there.
        prompt_notes: those of its prompt, once it was run: of each chunk the arrays, on the device
            until they are read, and how many entries count.
        captured: `{name: array}` of the tokens that were run, once it has ended.
        listeners: called after each change, by whatever thread makes it, once it has let go of
            `changed`; after those inside `listeners_later` at its end, and after those that a
            listener makes once it has returned.
        telling: held while they are called.
        has_news: whether there was a change since they were called last.
        reused: how many tokens of the prompt came out of the prefix cache.
        submitted: when it came, in seconds of `time.perf_counter`; the others likewise.
        first_token: when its first token was there.
    """

    prompt: np.ndarray
    budget: int
    stops: Stops
    seeds: np.ndarray
    controls: dict[str, np.ndarray]
    sampling: Sampling
    table: FormatTable | None = None
    captures: bool = False
    prompt_logprobs: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    new: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    reason: Reason | None = None
    error: BaseException | None = None
    notes: list[dict[str, np.ndarray]] = field(default_factory=list)
    prompt_notes: list[tuple[dict[str, Any], int]] | None = None
    captured: dict[str, np.ndarray] | None = None
    listeners: list[Callable[[], None]] = field(default_factory=list)
    telling: threading.Lock = field(default_factory=threading.Lock)
    has_news: bool = False
    reused: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None

    @property
    def ended(self) -> bool:
        """Whether there will be no more tokens."""
        return self.reason is not None

    def snapshot(self) -> tuple[np.ndarray, bool]:
        """Return the tokens so far, and whether these are all."""
        with self.changed:
            return self.new, self.ended

    def update(self, new: np.ndarray, reason: Reason | None = None) -> None:
        """Note the tokens so far, and whether these are all."""
        with self.changed:
            if self.ended:
                return
            if len(new) and self.first_token is None:
                self.first_token = time.perf_counter()
            self.new, self.reason = new, reason
            self.changed.notify_all()
        self.tell()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        with self.changed:
            if self.ended:
                return
            self.error, self.reason = error, "error"
            self.changed.notify_all()
        self.tell()

    def cancel(self) -> None:
        """End as it is: nobody waits for the rest."""
        with self.changed:
            if self.ended:
                return
            self.reason = "cancelled"
            self.changed.notify_all()
        self.tell()

    def tell(self) -> None:
        """Call the listeners, or leave it to `listeners_later`."""
        untold = _untold.get()
        if untold is not None:
            if self not in untold:
                untold.append(self)
            return
        self.has_news = True
        # Whoever finds it held leaves the news to who holds it: no listener runs inside itself.
        while self.has_news and self.telling.acquire(blocking=False):
            try:
                self.has_news = False
                self._call_listeners()
            finally:
                self.telling.release()

    def _call_listeners(self) -> None:
        for listener in [*self.listeners]:
            try:
                listener()
            except Exception:  # whose it is, others shall not wait for
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self.listeners.remove(listener)
                _log.exception("a listener of a request raised, and is not called again")
