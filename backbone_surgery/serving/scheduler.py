"""The scheduler: admits jobs, runs them together, and hands out their tokens, step by step."""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.formats.table import FormatTable
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.once import lora_settings
from backbone_surgery.rewriting.control import schedule_width
from backbone_surgery.rewriting.steer import Steer
from backbone_surgery.serving.batch import Chunk, RowBatch, controls_of_sizes
from backbone_surgery.serving.job import Job, listeners_later
from backbone_surgery.serving.logprobs import RecordedSampling
from backbone_surgery.serving.prefill import Prefill
from backbone_surgery.serving.prefix_cache import PrefixCache
from backbone_surgery.serving.row_programs import RowPrograms
from backbone_surgery.serving.warm_up import warm_up
from backbone_surgery.target import least_rows

STOP_IDS = 16
"""How many stop tokens a job can have."""
_FIRST_LENGTH = 256
"""Slots of a cache at first."""


class QueueFullError(SurgeryError):
    """As many requests wait as may."""


class ModelChangedError(SurgeryError):
    """The model of an engine has got another cached graph since."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine does, and has done.

    Attributes:
        waiting: requests that have no row yet.
        running: requests that have one.
        prompt_tokens: tokens of all prompts that were run or reused.
        reused_tokens: how many of them came out of the prefix cache.
        new_tokens: tokens that requests were given.
        prefix_cache_bytes: how much the prefix cache holds.
        compilations: how many programs of each kind were compiled.
    """

    waiting: int
    running: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    prefix_cache_bytes: int
    compilations: Mapping[str, int]


class Scheduler:
    """Runs jobs for an engine. Whoever calls `step` does all the work; any thread may `add`.

    Args:
        lm: the model.
        rows: how many jobs run at once; at least two on a GPU or TPU, see `target.least_rows`.
        length: tokens that a job can have.
        prefix_cache: bytes of prefilled chunks to keep.
        prefill_chunk: tokens of a prompt that are run at once.
        chunk_size: tokens that rows take between two looks at them.
        max_waiting: jobs that may wait.

    Attributes:
        work: held while the queue changes, and told of it.
    """

    def __init__(
        self,
        lm: CachedCausalLM,
        rows: int,
        length: int,
        prefix_cache: int,
        prefill_chunk: int,
        chunk_size: int,
        max_waiting: int,
    ) -> None:
        self.lm, self.prefill_chunk, self.max_waiting = lm, prefill_chunk, max_waiting
        self.prefix_cache = PrefixCache(prefix_cache) if prefix_cache else None
        sampling = RecordedSampling(chunk_size, lm.programs.head.input_dim)
        rows = max(rows, least_rows(lm.programs.platform))
        self.programs = RowPrograms(lm.programs, sampling, rows)
        self.lengths = _lengths(length, prefill_chunk)
        self.work = threading.Condition(threading.Lock())
        self._lock = threading.RLock()
        self._batch = RowBatch(self.programs, self.lengths, chunk_size, STOP_IDS)
        self._queue: deque[Job] = deque()
        self._prefill: Prefill | None = None
        self._chunk: Chunk | None = None
        self._schedules = _schedules(lm.opened, length)
        self._sizes: dict[str, tuple[int, ...]] = {
            **{name: x.shape for name, x in lm.opened.defaults.items()},
            **{name: (width,) for name, width in self._schedules.items()},
        }
        self._sizes_run = dict(self._sizes)
        self._weights: list[weakref.ref] = []
        self._lora: tuple = ()
        self._prompt_tokens = self._reused_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue or self._chunk or self._running() or self._batch.first_tokens)

    @property
    def stats(self) -> EngineStats:
        """What the engine does, and has done."""
        kept = self.prefix_cache
        with self.work:
            waiting = sum(not job.ended for job in self._queue)
        return EngineStats(
            waiting=waiting + (self._prefill is not None),
            running=self._batch.count,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            new_tokens=self._batch.new_tokens,
            prefix_cache_bytes=0 if kept is None else kept.nbytes,
            compilations=dict(self.programs.programs.compilations),
        )

    def check_model(self, operation: str) -> None:
        """Refuse a model that has got another cached graph since."""
        if self.lm.programs is not self.programs.programs:
            raise ModelChangedError(
                f"{operation}: expected the model as it was when the engine was made. Received one "
                "that was quantised since. Make another engine."
            )

    def add(self, jobs: list[Job], may_exceed: bool) -> None:
        """Put jobs into the queue; call it while `work` is held.

        Args:
            jobs: all of them, or none.
            may_exceed: whether they may be more than may wait, as long as nobody else waits long.

        Raises:
            QueueFullError: too many wait.
        """
        self._queue = deque(job for job in self._queue if not job.ended)
        if len(self._queue) + (1 if may_exceed else len(jobs)) > self.max_waiting:
            raise QueueFullError(
                f"submit: expected at most {self.max_waiting} requests to wait. Received one "
                "more. Try again later, or make an engine with a larger `max_waiting`."
            )
        for job in jobs:
            for name, x in job.controls.items():
                if name in self._schedules:  # what is past the length of a job never acts
                    job.controls[name] = x = x[:, : self._schedules[name]]
                known = self._sizes.get(name, x.shape[1:])
                self._sizes[name] = tuple(np.maximum(known, x.shape[1:]).tolist())
        self._queue.extend(jobs)
        self.work.notify_all()

    def step(self) -> bool:
        """Admit jobs, run one chunk of steps, and hand out tokens; whether there is more to do."""
        with listeners_later(), self._lock:  # they may step, or wait for another thread that does
            try:
                with self.programs.weights_of_now():
                    self._step()
            except BaseException as error:
                self._fail(error)
                raise
        return self.has_work

    def cancel_all(self) -> None:
        """Cancel all jobs."""
        with self._lock:
            with self.work:
                waiting = [*self._queue]
            jobs = [*waiting, *self._running()]
        for job in jobs:
            job.cancel()

    def clear(self) -> None:
        """Empty the prefix cache."""
        with self._lock:
            if self.prefix_cache is not None:
                self.prefix_cache.clear()

    def warm_up(
        self, captures: bool, prompt_logprobs: bool, format_table: FormatTable | None
    ) -> None:
        """Compile every program that jobs can need; see `Engine.warm_up`."""
        controls = controls_of_sizes(_one_row(self.lm.opened), self._sizes)
        with self._lock, self.programs.weights_of_now():
            formats = None
            if format_table is not None:
                formats = self._batch.formats.warm_up(format_table)
            for kept in {False, captures}:
                warm_up(
                    self.programs,
                    controls,
                    self.lengths,
                    self.prefill_chunk,
                    STOP_IDS,
                    kept,
                    self.prefix_cache is not None,
                    prompt_logprobs,
                    formats,
                )

    def _running(self) -> list[Job]:
        """Return the jobs that have a row, or a prompt that is being run."""
        jobs = [job for job in self._batch.jobs if job is not None]
        return jobs if self._prefill is None else [self._prefill.job, *jobs]

    def _step(self) -> None:
        batch = self._batch
        batch.let_go()
        self._check_weights()
        if self._chunk is not None and batch.waits_for_captures:
            self._read()
        self._admit()
        self._check_weights()  # another thread may have set LoRA meanwhile
        # The next chunk is begun before the last one is looked at.
        following = batch.decode(stop_early=bool(self._queue))
        batch.read_first()
        self._read()
        self._chunk = following

    def _read(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._batch.read(chunk)

    def _admit(self) -> None:
        """Run prompts; less than two chunks of them while there are rows to keep waiting."""
        spent = 0
        while spent < self.prefill_chunk or not self._batch.running:
            if self._prefill is None:
                self._prefill = self._next_prefill()
            prefill = self._prefill
            if prefill is None:
                return
            if prefill.job.ended:
                self._prefill = None
                continue
            spent += prefill.step()
            if prefill.done:
                prefill.job.reused = prefill.reused
                self._prompt_tokens += len(prefill.job.prompt)
                self._reused_tokens += prefill.reused
                if prefill.job.budget:
                    self._batch.insert(prefill)
                else:
                    prefill.end()
                self._prefill = None

    def _next_prefill(self) -> Prefill | None:
        """Take the next request out of the queue, if it fits beside those that run."""
        with self.work:
            while self._queue and self._queue[0].ended:
                self._queue.popleft()
            if not self._queue or not self._batch.fits(self._queue[0]):
                return None
            job = self._queue.popleft()
            sizes = dict(self._sizes)
        if sizes != self._sizes_run:
            self.clear()  # what was run with inputs of other sizes need not have the same bits
            self._sizes_run = sizes
        try:
            job.controls = controls_of_sizes(job.controls, sizes)
            chunk = self.prefill_chunk
            return Prefill(self.programs, job, chunk, self.lengths, self.prefix_cache)
        except Exception as error:  # nobody else knows of the job here
            job.fail(error)
            raise

    def _check_weights(self) -> None:
        """Empty the prefix cache if a weight, or what LoRA is set to, is not what it was.

        A prompt of which a part has run keeps nothing then: it is of two models.
        """
        weights, lora = self.programs.weights, lora_settings(self.programs.model)
        before = [ref() for ref in self._weights]
        same = len(before) == len(weights) and all(
            a is b for a, b in zip(before, weights, strict=True)
        )
        if same and lora == self._lora:
            return
        self.clear()
        if self._prefill is not None:
            self._prefill.kept = None
        self._weights, self._lora = [weakref.ref(x) for x in weights], lora

    def _fail(self, error: BaseException) -> None:
        """Begin anew, and tell all that waited; who is told may submit again."""
        with self.work:
            waiting, self._queue = self._queue, deque()
        jobs = [*waiting, *self._running(), *(job for job, *_ in self._batch.first_tokens)]
        if self._chunk is not None:
            jobs += [row.job for row in self._chunk.rows]
        self._prefill, self._chunk = None, None
        self._batch.clear()
        for job in jobs:
            job.fail(error)


def _schedules(model: EditedBackbone, length: int) -> dict[str, int]:
    """Return the widths of schedules: for as many tokens as a job can have, from the start.

    So no schedule of a job takes another program.
    """
    steers = [fired.rewrite for fired in model.report if isinstance(fired.rewrite, Steer)]
    return {f"{steer.name}_schedule": schedule_width(length) for steer in steers}


def _one_row(model: EditedBackbone) -> dict[str, np.ndarray]:
    """Return one row of each control: its default, or zeros where an input has none."""
    zeros = {name: np.zeros(t.shape[1:]) for name, t in model.inputs_by_hand.items()}
    rows = {**zeros, **model.defaults}
    return {n: np.asarray(rows[n])[None].astype(t.dtype) for n, t in model.control_inputs.items()}


def _lengths(length: int, chunk: int) -> tuple[int, ...]:
    """Return the lengths that a cache can have: each twice the one before, multiples of a chunk."""
    last = -(-length // chunk) * chunk
    size, lengths = -(-_FIRST_LENGTH // chunk) * chunk, []
    while size < last:
        lengths.append(size)
        size *= 2
    return (*lengths, last)
