"""The engine: continuous batching over the cached graph, where each request has its own edit."""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.request import check_count, check_flag, read_request
from backbone_surgery.numbers import is_int
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.serving.batch import Chunk, RowBatch, controls_of_sizes
from backbone_surgery.serving.job import Job
from backbone_surgery.serving.prefill import Prefill
from backbone_surgery.serving.prefix_cache import PrefixCache
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.row_programs import RowPrograms
from backbone_surgery.serving.sampling import RowsSampling, read_sampling
from backbone_surgery.serving.warm_up import warm_up

_FIRST_LENGTH = 256
"""Slots of a cache at first."""
_STOP_IDS = 16
"""How many stop tokens a request can have."""


class QueueFullError(SurgeryError):
    """As many requests wait as may."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine does, and has done.

    Attributes:
        waiting: requests that have no row yet.
        running: requests that have one.
        prompt_tokens: tokens of all prompts that were run or reused.
        reused_tokens: how many of them came out of the prefix cache.
        new_tokens: tokens that were generated.
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


class Engine:
    """Generate for many requests at once, which come and go while others run.

    A request's text is what `lm.generate` gives for it alone: it depends neither on what runs
    beside it nor on when it came. Every request has controls, sampler settings, seed and stops of
    its own; all of them run in one compiled program.

    Use it as a context manager, and a thread of its own runs it; or drive it by hand with `step`.
    Without a thread, whoever waits for a request drives it.

    Args:
        lm: the model. Its backbone, edits and weights are used as they are at each step.
        rows: how many requests run at once.
        length: tokens that a request can have, its prompt and new ones; at most as many as the
            model has learned positions.
        prefix_cache: bytes of prefilled chunks to keep, for prompts that begin alike; 0 for none.
        prefill_chunk: tokens of a prompt that are run between two chunks of steps.
        chunk_size: tokens that rows take between two looks at them.
        max_waiting: requests that may wait for a row.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> engine = bs.Engine(lm, rows=2)
        >>> prompt = {"token_ids": np.array([[1, 2, 3]]), "padding_mask": np.ones((1, 3))}
        >>> request = engine.submit(prompt, max_new_tokens=4, stop_token_ids=None)
        >>> request.result().shape
        (7,)
    """

    def __init__(
        self,
        lm: CachedCausalLM,
        rows: int = 16,
        length: int = 2048,
        prefix_cache: int = 2**28,
        prefill_chunk: int = 128,
        chunk_size: int = 8,
        max_waiting: int = 1024,
    ) -> None:
        if not isinstance(lm, CachedCausalLM):
            raise SurgeryError(
                f"Engine: expected a CachedCausalLM. Received {shown(lm)}. Make one of the "
                "backbone, edited or not."
            )
        check_count("Engine", "rows", rows, "rows")
        check_count("Engine", "length", length, "tokens")
        check_count("Engine", "prefill_chunk", prefill_chunk, "tokens")
        check_count("Engine", "chunk_size", chunk_size, "tokens")
        check_count("Engine", "max_waiting", max_waiting, "requests")
        if not is_int(prefix_cache) or prefix_cache < 0:
            raise SurgeryError(
                f"Engine at 'prefix_cache': expected a number of bytes, or 0 for none. Received "
                f"{shown(prefix_cache)}. Pass `2**28`, say."
            )
        self.lm, self.rows = lm, rows
        self.length = min(length, lm.max_positions or length)
        self.prefill_chunk, self.max_waiting = prefill_chunk, max_waiting
        self.prefix_cache = PrefixCache(prefix_cache) if prefix_cache else None
        self._programs = RowPrograms(lm.programs, RowsSampling(), rows)
        self._lengths = _lengths(self.length, prefill_chunk)
        self._batch = RowBatch(self._programs, self._lengths, chunk_size, _STOP_IDS)
        self._queue: deque[Job] = deque()
        self._prefill: Prefill | None = None
        self._chunk: Chunk | None = None
        self._sizes = {name: x.shape for name, x in lm.opened.defaults.items()}
        self._sizes_run = dict(self._sizes)
        self._weights: list[weakref.ref] = []
        self._prompt_tokens = self._reused_tokens = self._new_tokens = 0
        self._lock = threading.RLock()
        self._work = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """What the engine does, and has done."""
        kept = self.prefix_cache
        return EngineStats(
            waiting=len(self._queue) + (self._prefill is not None),
            running=self._batch.count,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            new_tokens=self._new_tokens,
            prefix_cache_bytes=0 if kept is None else kept.nbytes,
            compilations=dict(self.lm.programs.compilations),
        )

    def submit(
        self,
        prompt: Any,
        max_new_tokens: int | None = 64,
        controls: Mapping[str, Any] | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Any = "auto",
        stop_sequences: Any = None,
        strip_prompt: bool = False,
        return_captures: bool = False,
    ) -> EngineRequest:
        """Ask for one text. It returns at once, and the text comes as the engine runs.

        Args:
            prompt: a string; without a preprocessor a dict of `token_ids` int[1, length] and
                `padding_mask` [1, length].
            max_new_tokens: new tokens at most; `None` for as many as the engine's length leaves.
            controls: as of `CachedCausalLM.generate`, for one row.
            seed: an int; without one, each request draws differently.
            temperature: what logits are divided by; 0 takes the likeliest token each time. If
                neither this nor `top_k` nor `top_p` is passed, the sampler that the model was
                compiled with says how tokens are chosen.
            top_k: how many of the likeliest tokens to draw from; 0 for all.
            top_p: draw from the likeliest tokens that have this probability together.
            stop_token_ids: see `CachedCausalLM.generate`, as for all that follow.
            stop_sequences: see there.
            strip_prompt: see there.
            return_captures: see there.

        Raises:
            QueueFullError: `max_waiting` requests wait already.
            SurgeryError: bad input, before anything is run.
        """
        requests = self._submit(
            [prompt] if isinstance(prompt, str) else prompt,
            1,
            max_new_tokens=max_new_tokens,
            controls=controls,
            seed=seed,
            sampling=(temperature, top_k, top_p),
            stop_token_ids=stop_token_ids,
            stop_sequences=stop_sequences,
            strip_prompt=strip_prompt,
            captures=return_captures,
        )
        return requests[0]

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int = 64,
        controls: Mapping[str, Any] | None = None,
        seed: Any = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Any = "auto",
        stop_sequences: Any = None,
        strip_prompt: bool = False,
    ) -> list[Any]:
        """Generate from many prompts, however many rows there are.

        Args:
            inputs: strings; without a preprocessor a dict of arrays, as of
                `CachedCausalLM.generate`.
            max_new_tokens: see `submit`.
            controls: as of `CachedCausalLM.generate`: values for all prompts, or one for each.
            seed: an int, the seed of every row, or one for each row.
            temperature: see `submit`, as for all that follow.
            top_k: see there.
            top_p: see there.
            stop_token_ids: see there.
            stop_sequences: see there.
            strip_prompt: see there.

        Returns:
            The texts in the order of the prompts; int32[tokens] for each without a preprocessor.
        """
        requests = self._submit(
            inputs,
            None,
            max_new_tokens=max_new_tokens,
            controls=controls,
            seed=seed,
            sampling=(temperature, top_k, top_p),
            stop_token_ids=stop_token_ids,
            stop_sequences=stop_sequences,
            strip_prompt=strip_prompt,
            captures=False,
        )
        return [request.result() for request in requests]

    def warm_up(self, captures: bool = False) -> None:
        """Compile every program that requests can need, so that none waits for it.

        What is not covered are controls of other sizes than their defaults: a `Schedule` of more
        than 64 steps, or a `Patch` of more positions.

        Args:
            captures: whether requests with `return_captures=True` are to come, too.
        """
        controls = _one_row(self.lm.opened)
        with self._lock:
            for kept in {False, captures}:
                warm_up(
                    self._programs,
                    controls,
                    self._lengths,
                    self.prefill_chunk,
                    _STOP_IDS,
                    kept,
                    self.prefix_cache is not None,
                )

    def clear(self) -> None:
        """Empty the prefix cache. New weights empty it by themselves."""
        with self._lock:
            if self.prefix_cache is not None:
                self.prefix_cache.clear()

    def step(self) -> bool:
        """Admit requests, run one chunk of steps, and hand out tokens.

        Returns:
            Whether there is more to do.
        """
        with self._lock:
            try:
                self._step()
            except BaseException as error:
                self._fail(error)
                raise
            return self._has_work()

    def close(self) -> None:
        """Refuse new requests, finish those that are here, and end the thread."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            with self._work:
                self._work.notify_all()
            thread.join()
            self._thread = None

    def __enter__(self) -> "Engine":
        """Start a thread that runs the engine."""
        self._closed = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Finish what was asked for; after an error, cancel it."""
        if error[0] is not None:
            with self._lock:
                for job in [*self._queue, *self._jobs()]:
                    job.cancel()
        self.close()

    def _submit(self, inputs: Any, count: int | None, **asked: Any) -> list[EngineRequest]:
        """Read requests, one for each prompt, and put them into the queue."""
        for name in ("strip_prompt", "captures"):
            check_flag(name, asked[name])
        sampling = read_sampling(self.lm.sampler, *asked["sampling"])
        _, _, batch = read_request(
            self.lm,
            inputs,
            self.length if asked["max_new_tokens"] is None else None,
            asked["max_new_tokens"],
            asked["stop_token_ids"],
            asked["stop_sequences"],
            asked["controls"],
            asked["seed"],
            bool(asked["captures"]),
        )
        self._check(batch, count)
        jobs = [
            Job(
                prompt=part.rows[0],
                budget=int(part.budget[0]),
                stops=part.stops,
                seeds=part.seeds,
                controls=part.controls,
                sampling=sampling,
                captures=part.captures,
            )
            for part in batch.split(1)
        ]
        with self._work:
            if self._closed:
                raise SurgeryError(
                    "submit: expected an engine that is open. Received one that was closed. Make "
                    "another, or enter it again."
                )
            self._queue = deque(job for job in self._queue if not job.ended)
            # `generate` may bring more prompts than may wait, as long as nobody else does.
            if len(self._queue) + (len(jobs) if count else 1) > self.max_waiting:
                raise QueueFullError(
                    f"submit: expected at most {self.max_waiting} requests to wait. Received one "
                    "more. Try again later, or make an engine with a larger `max_waiting`."
                )
            for job in jobs:
                for name, x in job.controls.items():
                    known = self._sizes.get(name, x.shape[1:])
                    self._sizes[name] = tuple(np.maximum(known, x.shape[1:]).tolist())
            self._queue.extend(jobs)
            self._work.notify_all()
        return [EngineRequest(job, self._advance, bool(asked["strip_prompt"])) for job in jobs]

    def _check(self, batch: Any, count: int | None) -> None:
        if count is not None and len(batch.rows) != count:
            raise SurgeryError(
                f"submit: expected one prompt. Received {len(batch.rows)}. Use `generate` for many."
            )
        for i, (row, budget) in enumerate(zip(batch.rows, batch.budget, strict=True)):
            if len(row) + budget > self.length:
                raise SurgeryError(
                    f"submit at row {i}: expected a prompt and new tokens of at most {self.length} "
                    f"together. Received {len(row)} and {budget}. Make an engine of a larger "
                    "`length`, as far as the model has positions."
                )
        if len(batch.stops.ids) >= _STOP_IDS:
            raise SurgeryError(
                f"submit at 'stop_token_ids': expected fewer than {_STOP_IDS}. Received "
                f"{len(batch.stops.ids)}. Pass the others as `stop_sequences`."
            )

    def _jobs(self) -> list[Job]:
        """Return the jobs that are being run."""
        jobs = [job for job in self._batch.jobs if job is not None]
        return jobs if self._prefill is None else [self._prefill.job, *jobs]

    def _has_work(self) -> bool:
        return bool(self._queue or self._chunk or self._jobs() or self._batch.first_tokens)

    def _advance(self, job: Job, count: int) -> None:
        """Return once a job has more tokens than `count`, or has ended."""
        while self._thread is None and len(job.new) <= count and not job.ended:
            if not self.step() and not job.ended:
                return
        with job.changed:
            while len(job.new) <= count and not job.ended:
                job.changed.wait()

    def _run(self) -> None:
        """Run until the engine is closed and nothing is left to do."""
        while True:
            with self._work:
                while not self._has_work() and not self._closed:
                    self._work.wait()
                if self._closed and not self._has_work():
                    return
            try:
                self.step()
            except Exception:  # those who wait for a request have been told
                continue

    def _step(self) -> None:
        batch = self._batch
        batch.let_go()
        if self._chunk is not None and batch.waits_for_captures:
            self._read()
        self._admit()
        # The next chunk is begun before the last one is looked at.
        following = batch.decode(stop_early=bool(self._queue))
        batch.read_first()
        self._read()
        self._chunk = following

    def _read(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            before = sum(len(row.job.new) for row in chunk.rows)
            self._batch.read(chunk)
            self._new_tokens += sum(len(row.job.new) for row in chunk.rows) - before

    def _admit(self) -> None:
        """Run prompts, one chunk of them at most while there are rows to keep waiting."""
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
        """Take the next request out of the queue, if there is a row for it."""
        with self._work:
            while self._queue and self._queue[0].ended:
                self._queue.popleft()
            if not self._queue or not self._batch.free_rows:
                return None
            job = self._queue.popleft()
            sizes = dict(self._sizes)
        if sizes != self._sizes_run:
            self.clear()  # what was run with inputs of other sizes need not have the same bits
            self._sizes_run = sizes
        try:
            job.controls = controls_of_sizes(job.controls, sizes)
            self._check_weights()
            chunk = self.prefill_chunk
            return Prefill(self._programs, job, chunk, self._lengths, self.prefix_cache)
        except Exception as error:  # nobody else knows of the job here
            job.fail(error)
            raise

    def _check_weights(self) -> None:
        """Empty the prefix cache if a weight is not what it was."""
        weights = self.lm.programs.weights()
        before = [ref() for ref in self._weights]
        same = len(before) == len(weights) and all(
            a is b for a, b in zip(before, weights, strict=True)
        )
        if not same:
            self.clear()
            self._weights = [weakref.ref(x) for x in weights]

    def _fail(self, error: BaseException) -> None:
        """Tell all that wait, and begin anew."""
        for job in [*self._queue, *self._jobs(), *(job for job, *_ in self._batch.first_tokens)]:
            job.fail(error)
        if self._chunk is not None:
            for row in self._chunk.rows:
                row.job.fail(error)
        self._queue.clear()
        self._prefill, self._chunk = None, None
        self._batch.clear()


def _one_row(model: EditedBackbone) -> dict[str, np.ndarray]:
    """Return one row of each control: its default, or zeros where an input has none."""
    inputs = [t for t in model.inputs if t.name not in ("token_ids", "padding_mask")]
    known = model.defaults
    rows = {t.name: known[t.name] if t.name in known else np.zeros(t.shape[1:]) for t in inputs}
    return {t.name: np.asarray(rows[t.name])[None].astype(t.dtype) for t in inputs}


def _lengths(length: int, chunk: int) -> tuple[int, ...]:
    """Return the lengths that a cache can have: each twice the one before, multiples of a chunk."""
    last = -(-length // chunk) * chunk
    size, lengths = -(-_FIRST_LENGTH // chunk) * chunk, []
    while size < last:
        lengths.append(size)
        size *= 2
    return (*lengths, last)
