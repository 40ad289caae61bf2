"""Answers: from requests of the engine to what OpenAI's clients read, whole or as events."""

import asyncio
import base64
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save

from backbone_surgery.errors import SurgeryError
from backbone_surgery.serving.job import RequestError
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.web.logprobs import ShownLogprobs

_log = logging.getLogger(__name__)


@dataclass
class Answer:
    """The answer to one body: its choices, and how they are shown.

    Attributes:
        requests: one for each choice.
        model: the model's name.
        is_chat: which of the two routes it is for.
        stops: stop sequences, which are left out of the text.
        capture: sites to answer with; none by default.
        prefix: text that each choice begins with, such as an echoed prompt.
        likeliest: how many of the likeliest tokens to show with log-probabilities; `None` for none.
        n: how many choices in a row have the same prompt, which `usage` counts once.
    """

    requests: Sequence[EngineRequest]
    model: str
    is_chat: bool
    stops: Sequence[str] = ()
    capture: Sequence[str] = ()
    prefix: Sequence[str] = ()
    likeliest: int | None = None
    n: int = 1
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._changed = changed

        def tell() -> None:
            # It must not hold the answer: the engine holds it for as long as the requests are.
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        for request in self.requests:
            request.listen(tell)
        self._logprobs = [
            ShownLogprobs(request, self.likeliest, self.is_chat)
            for request in self.requests
            if self.likeliest is not None
        ]

    def cancel(self) -> None:
        """Cancel what still runs."""
        for request in self.requests:
            request.cancel()

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the answer."""
        while any(request.finish_reason is None for request in self.requests):
            await self.wait()
        texts = [await self._visible(i) for i in range(len(self.requests))]
        choices = []
        for i, request in enumerate(self.requests):
            text = self._prefix(i) + texts[i]
            content: dict[str, Any] = {"text": text}
            if self.is_chat:
                content = {"message": {"role": "assistant", "content": text}}
            logprobs = await self._next_logprobs(i, texts[i], self.prefix)
            end = await asyncio.to_thread(self._end, request)
            choices.append({"index": i, **content, "logprobs": logprobs, **end})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events: pieces of text as they come, then the ends, then `[DONE]`."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        sent, ended = [""] * len(self.requests), [False] * len(self.requests)
        try:
            for i in range(len(self.requests)):
                if self.is_chat:
                    yield self._event(kind, i, {"delta": {"role": "assistant", "content": ""}})
                elif self._prefix(i):
                    yield self._event(kind, i, {"text": self._prefix(i)})
            while not all(ended):
                for i, request in enumerate(self.requests):
                    if ended[i]:
                        continue
                    shown: dict[str, Any]
                    is_last = request.finish_reason is not None
                    text = await self._visible(i)
                    piece = text[len(sent[i]) :] if text.startswith(sent[i]) else ""
                    sent[i] += piece
                    if piece:
                        shown = {"delta": {"content": piece}} if self.is_chat else {"text": piece}
                        shown["logprobs"] = await self._next_logprobs(i, text)
                        yield self._event(kind, i, shown)
                    if is_last:
                        ended[i] = True
                        shown = {"delta": {}} if self.is_chat else {"text": ""}
                        end = await asyncio.to_thread(self._end, request)
                        yield self._event(kind, i, {**shown, **end})
                if not all(ended):
                    await self.wait()
            if include_usage:
                yield _sse({**self._head(kind), "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _sse(error_body(str(error), "invalid_request_error"))
        except Exception as error:
            _log.exception("an answer could not be made")
            yield _sse(failure_body(error))
        finally:
            self.cancel()

    async def wait(self) -> None:
        """Wait for a change, or a second."""
        try:
            await asyncio.wait_for(self._changed.wait(), 1.0)
        except TimeoutError:
            return
        self._changed.clear()

    async def _visible(self, index: int) -> str:
        """Return the text of a choice as far as it can be shown.

        A stop sequence is left out, and what may be the beginning of one is held back.
        """
        request = self.requests[index]
        if request.finish_reason == "error":
            try:
                request.result()
            except RequestError:
                raise
            except SurgeryError as error:  # which would be answered as a fault of the request
                raise RuntimeError("the engine failed") from error
        ended = request.finish_reason is not None
        text = await asyncio.to_thread(request.added_text)
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)]
        if ended:
            return text
        tail = range(max(0, len(text) - max(map(len, self.stops), default=0)), len(text))
        held = (n for n in tail if any(s.startswith(text[n:]) for s in self.stops))
        return text[: next(held, len(text))]

    async def _next_logprobs(
        self, index: int, text: str, echoed: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of what a choice shows now, and did not before."""
        if self.likeliest is None:
            return None
        shown = self._logprobs[index]
        if echoed:
            return await asyncio.to_thread(shown.echoed, echoed[index], text)
        return await asyncio.to_thread(shown.next, len(text))

    def _prefix(self, index: int) -> str:
        return self.prefix[index] if self.prefix else ""

    def _end(self, request: EngineRequest) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": request.finish_reason or "stop"}
        if self.capture:
            captures = request.captures
            arrays = {site: np.ascontiguousarray(captures[site][0]) for site in self.capture}
            data = save({**arrays, "token_ids": captures.token_ids[0]})
            end["captures"] = {
                "format": "safetensors",
                "encoding": "base64",
                "data": base64.b64encode(data).decode(),
                "prompt_tokens": len(request.prompt_token_ids),
                "tokens": request.token_texts,
            }
        return end

    def _event(self, kind: str, index: int, content: dict[str, Any]) -> str:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **content}
        return _sse({**self._head(kind), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        start = "chatcmpl" if self.is_chat else "cmpl"
        head = {"id": f"{start}-{self.id}", "object": kind, "created": self.created}
        return {**head, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        firsts = self.requests[:: self.n]
        prompt = sum(len(request.prompt_token_ids) for request in firsts)
        new = sum(len(request.token_ids) for request in self.requests)
        reused = sum(request.reused_tokens for request in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def failure_body(error: Exception) -> dict[str, Any]:
    """Return what a client is told of an error that is none of its own; the log has the rest."""
    text = f"the server failed: {type(error).__name__}. Its log says more. Try again later."
    return error_body(text, "server_error")


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
