"""A request: what `Engine.submit` returns."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.captures import GeneratedActivations, pack
from backbone_surgery.generation.prompts import to_text
from backbone_surgery.serving.job import Job, Reason, RequestError
from backbone_surgery.serving.logprobs import TokenLogprobs


class EngineRequest:
    """One text that an engine is making.

    Iterate over it for its pieces, or wait for its `result`. A request that is let go of is
    cancelled.

    Args:
        job: the request inside the engine.
        advance: called with the number of tokens that are known; it returns once there are more, or
            the text has ended.
        strip_prompt: whether the text is the new part alone.
    """

    def __init__(self, job: Job, advance: Callable[[Job, int], None], strip_prompt: bool) -> None:
        self._job, self._advance, self._strip_prompt = job, advance, strip_prompt
        weakref.finalize(self, job.cancel).atexit = False

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """The token ids of the prompt, int32[length]."""
        return self._job.prompt

    @property
    def token_ids(self) -> np.ndarray:
        """The new token ids so far, int32[tokens]."""
        return self._job.new

    @property
    def preprocessor(self) -> Any:
        """What makes text of its token ids; `None` without one."""
        return self._job.stops.preprocessor

    @property
    def finish_reason(self) -> Reason | None:
        """Why it ended: "stop", "length", "cancelled" or "error"; `None` while it runs."""
        return self._job.reason

    @property
    def reused_tokens(self) -> int:
        """How many tokens of the prompt came out of the prefix cache."""
        return self._job.reused

    @property
    def seconds_to_first_token(self) -> float | None:
        """The time from `submit` to the first token; `None` before."""
        job = self._job
        return None if job.first_token is None else job.first_token - job.submitted

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a function called after one or more changes, in a thread that made one of them.

        For one request it is never called inside itself. It may call the engine's `step`, or wait
        for another request. An exception is logged, and it is not called again; the request goes
        on.
        """
        self._job.listeners.append(listener)

    def __iter__(self) -> Iterator[Any]:
        """Yield the text piece by piece, as `stream` does; token ids without a preprocessor.

        The pieces join to the `result`. Closing the iterator before the end cancels the request.
        """
        job, count, shown = self._job, -1, ""
        try:
            while True:
                self._advance(job, count)
                new, ended = job.snapshot()
                if job.error is not None:
                    raise job.error
                if self.preprocessor is None:
                    if len(new) > max(count, 0):
                        yield new[max(count, 0) :]
                else:
                    text = self.text
                    piece = text[len(shown) :] if text.startswith(shown) else ""
                    shown += piece
                    if piece:
                        yield piece
                count = len(new)
                if ended:
                    return
        finally:
            if not job.ended:
                self.cancel()

    @property
    def text(self) -> str:
        """The text so far. A character that takes several tokens is held back until it is whole.

        Raises:
            SurgeryError: the model has no preprocessor.
        """
        job = self._job
        if self.preprocessor is None:
            raise SurgeryError(
                "text of a request: expected a model with a preprocessor, to make text. Received "
                "one without. Use `token_ids`."
            )
        ended, new = job.ended, job.new
        text = job.stops.render(job.prompt, new, self._strip_prompt)
        return text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def added_text(self, tokens: int | None = None) -> str:
        """Return what the new tokens so far add to the text of the prompt, as far as it is whole.

        It is what a client puts after its prompt: with the space between them, which the `text` of
        a stripped prompt lacks where the tokenizer leaves out the one that a text begins with.

        Args:
            tokens: of this many of the new tokens, whole or not; all of them by default.
        """
        job = self._job
        if tokens is not None:
            return job.stops.added(job.prompt, job.new[:tokens])
        ended, new = job.ended, job.new
        text = job.stops.added(job.prompt, new)
        return text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")

    @property
    def token_texts(self) -> list[str]:
        """The text that each token adds, of the prompt and the new ones; they join to the whole.

        Of a character that takes several tokens, the last one has it.
        """
        ids = np.concatenate([self._job.prompt, self._job.new])
        rows = [ids[: i + 1] for i in range(len(ids))]
        texts = to_text(rows, self.preprocessor) if rows else []
        pieces, shown = [], ""
        for i, text in enumerate(texts):
            text = text if i + 1 == len(texts) else text.rstrip("\N{REPLACEMENT CHARACTER}")
            pieces.append(text[len(shown) :] if text.startswith(shown) else "")
            shown += pieces[-1]
        return pieces

    def result(self) -> Any:
        """Wait for the end, and return the text; int32[tokens] without a preprocessor.

        Raises:
            SurgeryError: what went wrong.
        """
        job = self._job
        while not job.ended:
            self._advance(job, len(job.new))
        if job.error is not None:
            raise job.error
        if self.preprocessor is not None:
            return self.text
        return job.new if self._strip_prompt else np.concatenate([job.prompt, job.new])

    @property
    def captures(self) -> GeneratedActivations:
        """What the graph captured, of the prompt and the new tokens but the last; waits for it.

        Raises:
            SurgeryError: the request did not ask for it, or did not run to its end.
        """
        self.result()
        job = self._job
        if job.captured is None:
            raise SurgeryError(
                "captures of a request: expected one that asked for them and ran to its end. "
                f"Received one with return_captures={job.captures} that ended by {job.reason!r}. "
                "Pass `return_captures=True` to `submit`."
            )
        return pack([np.append(job.prompt, job.new[:-1]).astype(np.int32)], [job.captured])

    @property
    def logprobs(self) -> TokenLogprobs:
        """Log-probabilities of the new tokens so far.

        Those of the prompt are `prompt_logprobs`.

        Raises:
            SurgeryError: the request did not ask for them.
        """
        job = self._job
        if not job.sampling.logprobs:
            raise SurgeryError(
                "logprobs of a request: expected one that asked for them. Received one that did "
                "not. Pass `logprobs=True` to `submit`."
            )
        new, parts = job.new, list(job.notes)
        if not len(new):
            empty = np.zeros((0, 0), np.float32)
            return TokenLogprobs(new, np.zeros(0, np.float32), empty.astype(np.int32), empty)
        notes = {k: np.concatenate([part[k] for part in parts])[: len(new)] for k in parts[0]}
        return TokenLogprobs(new, **notes)

    @property
    def prompt_logprobs(self) -> TokenLogprobs:
        """Log-probabilities of the prompt but its first token.

        It waits for the first new token, or for the end where none is asked for.

        Raises:
            SurgeryError: the request did not ask for them, ended before its prompt was run, or has
                logits that are no numbers.
        """
        job = self._job
        if not job.prompt_logprobs:
            raise SurgeryError(
                "prompt_logprobs of a request: expected one that asked for them. Received one that "
                "did not. Pass `prompt_logprobs=True` to `submit`."
            )
        self._advance(job, 0)
        if job.prompt_notes is None:
            raise job.error or SurgeryError(
                "prompt_logprobs of a request: expected one whose prompt was run. Received one "
                f"that ended by {job.reason!r} before. Submit it again."
            )
        parts, tokens = job.prompt_notes, job.prompt[1:]
        notes = {
            name: np.concatenate([np.asarray(part[name])[:count] for part, count in parts])
            for name in parts[0][0]
        }
        job.prompt_notes = [(notes, len(job.prompt))]  # they need not lie on the device any more
        found = TokenLogprobs(tokens, **{name: x[: len(tokens)] for name, x in notes.items()})
        wrong = np.flatnonzero(~np.isfinite(found.likeliest_logprobs[:, 0]))
        if len(wrong):
            raise RequestError(
                f"prompt_logprobs at token {wrong[0] + 1}: expected logits that are numbers. "
                "Received NaN or infinite ones. Look for weights, strengths or directions that are "
                "too large or no numbers."
            )
        return found

    def cancel(self) -> None:
        """Stop: the text stays as it is, and the row is free for others after the next chunk."""
        self._job.cancel()
