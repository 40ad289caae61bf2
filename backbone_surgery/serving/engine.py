"""The engine: continuous batching over the cached graph, where each request has its own edit."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.formats.requested import read_format
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.penalties import Penalties, read_penalties
from backbone_surgery.generation.request import TooLongError, check_backend, read_request
from backbone_surgery.numbers import check_count, check_flag, is_int
from backbone_surgery.serving.job import Job
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.sampling import read_sampling
from backbone_surgery.serving.scheduler import STOP_IDS, EngineStats, Scheduler


class Engine:
    """Generate for many requests at once, which come and go while others run.

    A request's text is what `lm.generate` gives for it alone: it depends neither on what runs
    beside it nor on when it came. Every request has controls, sampler settings, seed and stops of
    its own; all of them run in one compiled program.

    Use it as a context manager, and a thread of its own runs it; or drive it by hand with `step`.
    Without a thread, whoever waits for a request drives it.

    Args:
        lm: the model. Its backbone, edits and weights are used as they are at each step; after
            `lm.quantize` make another engine. Products are as precise as its `precision` says, or
            as JAX is set to in the thread that runs the engine: not by a `with` of another thread.
        rows: how many requests run at once; on a mesh, rounded up to divide by its batch axis.
        length: tokens that a request can have, its prompt and new ones; at most as many as the
            model has learned positions.
        prefix_cache: bytes of prefilled chunks to keep, for prompts that begin alike; 0 for none.
        prefill_chunk: tokens of a prompt that are run at once. Between two chunks of steps, less
            than twice as many are.
        chunk_size: tokens that rows take between two looks at them.
        max_waiting: requests that may wait for a row.

    Raises:
        SurgeryError: `lm` is no `CachedCausalLM`, or lies in several processes; a number does not
            fit.

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
        check_backend("Engine")
        hosts.refuse(lm, "Engine", "Call `generate` in all of them.")
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
        self.lm, self.rows = lm, lm.programs.padded(rows)
        self.length = min(length, lm.max_positions or length)
        self.max_waiting = max_waiting
        self._scheduler = Scheduler(
            lm, self.rows, self.length, prefix_cache, prefill_chunk, chunk_size, max_waiting
        )
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """What the engine does, and has done."""
        return self._scheduler.stats

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
        logprobs: bool = False,
        penalties: Penalties | None = None,
        prompt_logprobs: bool = False,
        response_format: ResponseFormat | None = None,
    ) -> EngineRequest:
        """Ask for one text. It returns at once, and the text comes as the engine runs.

        Args:
            prompt: a string; or a dict of `token_ids` int[1, length] and `padding_mask`
                [1, length], the only way without a preprocessor.
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
            logprobs: whether to note log-probabilities, for `EngineRequest.logprobs`.
            penalties: against repetition, and for or against tokens; see `Penalties`.
            prompt_logprobs: whether to note log-probabilities of the prompt, for
                `EngineRequest.prompt_logprobs`. Nothing of it then comes out of the prefix cache,
                and the logits of the first new token may round otherwise.
            response_format: what the new text has to be; see `ResponseFormat`.

        Returns:
            The request: iterate over it for pieces of text, or wait for its `result`.

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
            logprobs=logprobs,
            penalties=penalties,
            prompt_logprobs=prompt_logprobs,
            response_format=response_format,
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
        penalties: Penalties | None = None,
        response_format: ResponseFormat | list[ResponseFormat | None] | None = None,
    ) -> list[Any]:
        """Generate from many prompts, however many rows there are.

        Args:
            inputs: strings, or a dict of arrays, as of `CachedCausalLM.generate`.
            max_new_tokens: see `submit`.
            controls: as of `CachedCausalLM.generate`: values for all prompts, or one for each.
            seed: an int, the seed of every row, or one for each row.
            temperature: see `submit`, as for all that follow.
            top_k: see there.
            top_p: see there.
            stop_token_ids: see there.
            stop_sequences: see there.
            strip_prompt: see there.
            penalties: see `submit`.
            response_format: for all prompts, or a list with one or `None` for each.

        Returns:
            The texts in the order of the prompts; int32[tokens] for each without a preprocessor.

        Raises:
            QueueFullError: `max_waiting` requests of others wait already.
            SurgeryError: bad input, before anything is run.
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
            penalties=penalties,
            response_format=response_format,
        )
        return [request.result() for request in requests]

    def warm_up(
        self,
        captures: bool = False,
        prompt_logprobs: bool = False,
        response_format: ResponseFormat | None = None,
    ) -> None:
        """Compile every program that requests can need, so that none waits for it.

        What is not covered is a `Patch` of more positions, and a `Clamp` of more features, than
        their defaults.

        Args:
            captures: whether requests with `return_captures=True` are to come, too.
            prompt_logprobs: the same of those with `prompt_logprobs=True`.
            response_format: the largest one, if requests with response formats are to come. Each
                row has room for one like it then.

        Raises:
            SurgeryError: a format that the model cannot keep to.
        """
        self._scheduler.check_model("warm_up")
        lm, size = self.lm, self.lm.programs.head.input_dim
        table = read_format(response_format, lm.preprocessor, size, "warm_up")
        self._scheduler.warm_up(captures, prompt_logprobs, table)

    def clear(self) -> None:
        """Empty the prefix cache. New weights empty it by themselves."""
        self._scheduler.clear()

    def step(self) -> bool:
        """Admit requests, run one chunk of steps, and hand out tokens.

        Returns:
            Whether there is more to do.
        """
        return self._scheduler.step()

    def close(self) -> None:
        """Refuse new requests; if a thread runs the engine, let it finish those that are here."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            with self._scheduler.work:
                self._scheduler.work.notify_all()
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
            self._scheduler.cancel_all()
        self.close()

    def _submit(
        self, inputs: Any, count: int | None, strip_prompt: bool, **asked: Any
    ) -> list[EngineRequest]:
        """Read requests, one for each prompt, and put them into the queue."""
        operation = "Engine.generate" if count is None else "submit"
        check_flag(operation, "strip_prompt", strip_prompt)
        self._scheduler.check_model(operation)
        jobs = self._read(inputs, operation, **asked)
        if count is not None and len(jobs) != count:
            raise SurgeryError(
                f"submit: expected one prompt. Received {len(jobs)}. Use `generate` for many."
            )
        with self._scheduler.work:
            if self._closed:
                raise SurgeryError(
                    f"{operation}: expected an engine that is open. Received one that was closed. "
                    "Make another, or enter it again."
                )
            # `generate` may bring more prompts than may wait, as long as nobody else does.
            self._scheduler.add(jobs, may_exceed=count is None)
        return [EngineRequest(job, self._advance, bool(strip_prompt)) for job in jobs]

    def _read(
        self,
        inputs: Any,
        operation: str,
        sampling: tuple[Any, Any, Any],
        captures: bool = False,
        logprobs: bool = False,
        penalties: Penalties | None = None,
        prompt_logprobs: bool = False,
        **asked: Any,
    ) -> list[Job]:
        """Read what is asked for, a job for each prompt."""
        flags = {
            "return_captures": captures,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
        for name, value in flags.items():
            check_flag(operation, name, value)
        penalties = read_penalties(penalties, self.lm.programs.head.input_dim, operation)
        chosen = replace(
            read_sampling(self.lm.sampler, *sampling),
            logprobs=bool(logprobs),
            penalties=penalties or Penalties(),
        )
        whole = self.length if asked["max_new_tokens"] is None else None
        batch = read_request(
            self.lm, inputs, whole, captures=bool(captures), operation=operation, **asked
        ).batch
        self._check(batch, operation)
        return [
            Job(
                prompt=part.rows[0],
                budget=int(part.budget[0]),
                stops=part.stops,
                seeds=part.seeds,
                controls=part.controls,
                sampling=chosen,
                table=part.formats[0] if part.formats else None,
                captures=part.captures,
                prompt_logprobs=bool(prompt_logprobs),
            )
            for part in batch.split(1)
        ]

    def _check(self, batch: Any, operation: str) -> None:
        for i, (row, budget) in enumerate(zip(batch.rows, batch.budget, strict=True)):
            if len(row) + budget > self.length:
                raise TooLongError(
                    f"{operation} at row {i}: expected a prompt and new tokens of at most "
                    f"{self.length} together. Received {len(row)} and {budget}. Make an engine of "
                    "a larger `length`, as far as the model has positions.",
                    len(row) + int(budget),
                )
        if len(batch.stops.ids) >= STOP_IDS:
            raise SurgeryError(
                f"{operation} at 'stop_token_ids': expected fewer than {STOP_IDS}. Received "
                f"{len(batch.stops.ids)}. Pass the others as `stop_sequences`."
            )

    def _advance(self, job: Job, count: int) -> None:
        """Return once a job has more tokens than `count`, or has ended."""
        mine = (None, threading.current_thread())  # a listener may wait in the engine's own
        while self._thread in mine and len(job.new) <= count and not job.ended:
            if not self.step() and not job.ended:
                return
        with job.changed:
            while len(job.new) <= count and not job.ended:
                job.changed.wait()

    def _run(self) -> None:
        """Run until the engine is closed and nothing is left to do."""
        while True:
            with self._scheduler.work:
                while not self._scheduler.has_work and not self._closed:
                    self._scheduler.work.wait()
                if self._closed and not self._scheduler.has_work:
                    return
            try:
                self.step()
            except BaseException:  # those who wait have been told; a listener may raise any
                continue
