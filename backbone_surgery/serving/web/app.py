"""The application: its routes."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.prompts import to_text
from backbone_surgery.opening.site import places, select
from backbone_surgery.serving.engine import Engine
from backbone_surgery.serving.request import EngineRequest
from backbone_surgery.serving.web.answers import Answer
from backbone_surgery.serving.web.body import (
    ChatCompletion,
    Completion,
    Detokenize,
    Message,
    TextCompletion,
    Tokenize,
)
from backbone_surgery.serving.web.errors import add_errors
from backbone_surgery.serving.web.formats import FormatPreparation
from backbone_surgery.serving.web.key import KeyCheck
from backbone_surgery.serving.web.limits import BodyLimit
from backbone_surgery.serving.web.metrics import Metrics
from backbone_surgery.serving.web.steering import Vectors, describe_controls, read_steering
from backbone_surgery.serving.web.strict_json import StrictRoute
from backbone_surgery.serving.web.tokenizing import add_tokenizing
from backbone_surgery.vectors import ControlVector

_NEW_TOKENS = 16
"""New tokens of a completion that does not say how many, as OpenAI has it."""


_MOST_BYTES = 2**22
"""How large a body of JSON may be; a vector may be four times as large."""

_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)
"""What the playground may load: itself, and the routes of this server."""


class Service:
    """What the routes share.

    Args:
        engine: that makes the texts.
        name: of the model.
        vectors: named vectors to begin with.
        api_key: that every request but for `/health` has to bring; `None` lets all in.
        chat_template: in the place of the one that comes with the tokenizer.
        strengths: of controls, for requests that say none.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        vectors: Mapping[str, ControlVector],
        api_key: str | None,
        chat_template: str | None,
        strengths: Mapping[str, float],
    ) -> None:
        self.engine, self.name, self.lm = engine, name, engine.lm
        self.vectors = Vectors(engine.lm, vectors)
        self.api_key, self.chat_template = api_key, chat_template
        self.strengths = strengths
        if strengths:  # else the first request would be told of what is wrong with them
            by_hand = dict.fromkeys(self.lm.opened.inputs_by_hand, 0)
            controls = read_steering(self.lm, self.vectors, {}, engine.length, strengths)
            bind_controls(self.lm.opened, {**by_hand, **controls}, np.array([1]), "serve")
        self.metrics = Metrics(engine)
        self.formats = FormatPreparation(engine.lm)
        self.most_characters = engine.length * _longest_token(engine.lm.preprocessor)
        self.model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "backbone-surgery",
            "max_model_len": engine.length,
        }

    def no_model(self, name: str | None) -> str:
        """Return what to say of a model that this server does not have."""
        return (
            f"model '{name}': expected '{self.name}', which is what this server has. Received "
            "another. `GET /v1/models` names it."
        )

    def check_model(self, body: Completion | Tokenize | Detokenize) -> None:
        """Refuse a request for another model, as OpenAI's."""
        if body.model not in (None, self.name):
            raise HTTPException(404, self.no_model(body.model))

    def check_length(self, texts: Sequence[str]) -> None:
        """Refuse a prompt too long for the engine at once: tokenizing it takes seconds a MB."""
        count = sum(map(len, texts))
        if count > self.most_characters:
            raise SurgeryError(
                f"prompt: expected at most {self.most_characters} characters, as many as "
                f"{self.engine.length} of the longest tokens have. Received {count}. Shorten it."
            )

    def chat_prompt(self, messages: Sequence[Message], is_asked: bool = True) -> str:
        """Return the prompt of a chat, with the opening of an answer if one is asked for."""
        self.check_length([text for message in messages for text in message.texts])
        if self.chat_template is None and self.lm.chat_template is None:
            raise SurgeryError(
                "messages: expected a server with a chat template. Received a request to one "
                "without. Send a `prompt` to /v1/completions, or have the server started with "
                "`--chat-template`."
            )
        plain = [message.plain for message in messages]
        return self.lm.chat_prompt(plain, is_asked, template=self.chat_template)

    def submit(
        self,
        body: TextCompletion | ChatCompletion,
        prompts: Sequence[str | list[int]],
        max_tokens: int | None,
        wanted: ResponseFormat | None,
    ) -> list[EngineRequest]:
        """Send a request to the engine for each choice of each prompt; all of them, or none."""
        count, most = len(prompts) * body.choices, self.engine.max_waiting
        if count > most:
            raise SurgeryError(
                f"prompt: expected a request for at most {most} texts, as many as may wait here. "
                f"Received one for {count}. Send several requests."
            )
        body.penalties.check(self.lm.programs.head.input_dim, "'logit_bias'")
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_length([prompt])
        controls = read_steering(
            self.lm, self.vectors, body.steering or {}, self.engine.length, self.strengths
        )
        capture = self.sites(body)
        requests: list[EngineRequest] = []
        try:
            for prompt in prompts:
                for i in range(body.choices):
                    requests.append(
                        self.engine.submit(
                            _prompt(prompt),
                            max_new_tokens=max_tokens,
                            controls=controls,
                            seed=None if body.seed is None else (body.seed + i) % 2**32,
                            temperature=body.temperature,
                            top_k=body.top_k,
                            top_p=body.top_p,
                            stop_sequences=body.stops,
                            return_captures=bool(capture),
                            logprobs=body.likeliest is not None,
                            penalties=body.penalties,
                            prompt_logprobs=body.prompt_logprobs,
                            response_format=wanted,
                        )
                    )
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return requests

    def text(self, prompt: str | list[int]) -> str:
        """Return a prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return to_text([np.array(prompt, np.int32)], self.lm.preprocessor)[0]

    def sites(self, body: Completion) -> list[str]:
        """Return the captured sites that a request asks for."""
        if body.capture is None:
            return []
        known = list(self.lm.opened.captures)
        if not known:
            raise SurgeryError(
                "capture: expected a model that captures something. Received one without a "
                "`Capture`. Serve an edit that has one."
            )
        return list(dict.fromkeys(p for s in body.capture for p in select(s, known)))

    async def answer(self, answer: Answer, body: Completion, http: Request) -> Response:
        """Answer whole or as events; a client that leaves cancels its requests."""
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(
                self._stream(answer, answer.events(usage)), media_type="text/event-stream"
            )
        task = asyncio.create_task(answer.whole())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=1.0)
                if not task.done() and await http.is_disconnected():
                    return Response(status_code=499)
            return JSONResponse(task.result())
        finally:
            task.cancel()
            answer.cancel()
            self._count(answer)

    async def _stream(self, answer: Answer, events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for event in events:
                yield event
        finally:
            answer.cancel()
            self._count(answer)

    def _count(self, answer: Answer) -> None:
        for request in answer.requests:
            self.metrics.ended(request)


def make_app(service: Service) -> FastAPI:
    """Make the application of a server, whose routes share what the service holds."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with service.engine:
            yield
            await asyncio.to_thread(service.engine.close)

    app = FastAPI(
        title="backbone-surgery",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.router.route_class = StrictRoute
    app.add_middleware(BodyLimit, most_bytes=_MOST_BYTES)
    app.add_middleware(KeyCheck, api_key=service.api_key)
    app.state.engine = service.engine
    add_errors(app, service.engine.length)
    _add_completions(app, service)
    _add_chat(app, service)
    _add_steering(app, service)
    _add_state(app, service)
    add_tokenizing(app, service)
    return app


def _longest_token(preprocessor: Any) -> int:
    return max(map(len, preprocessor.tokenizer.get_vocabulary()))


def _prompt(prompt: str | list[int]) -> Any:
    if isinstance(prompt, str):
        return prompt
    return {"token_ids": [prompt], "padding_mask": [[True] * len(prompt)]}


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: TextCompletion, http: Request) -> Response:
        if body.prompt_logprobs and body.stream:
            raise SurgeryError(
                "echo: expected it without `stream` where `logprobs` are to be those of the prompt "
                "too. Received all three. Leave one out."
            )
        most = _NEW_TOKENS if body.max_tokens is None else body.max_tokens
        service.check_model(body)
        wanted = await service.formats.prepare(body)
        requests = await asyncio.to_thread(service.submit, body, body.prompts, most, wanted)
        n, sites, count = body.choices, service.sites(body), body.likeliest
        echoed = [service.text(p) for p in body.prompts for _ in range(n)] if body.echo else ()
        answer = Answer(requests, service.name, False, body.stops, sites, echoed, count, n)
        return await service.answer(answer, body, http)


def _add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletion, http: Request) -> Response:
        given = [n for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
        if len(given) > 1:
            raise SurgeryError(
                "max_tokens: expected it or `max_completion_tokens`. Received both. Send one."
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise SurgeryError(
                "top_logprobs: expected `logprobs` to be true with it. Received it alone. Send "
                "both."
            )

        service.check_model(body)
        wanted = await service.formats.prepare(body)

        def submit() -> list[EngineRequest]:
            prompt = service.chat_prompt(body.messages)
            return service.submit(body, [prompt], given[0] if given else None, wanted)

        requests = await asyncio.to_thread(submit)
        n, sites, count = body.choices, service.sites(body), body.likeliest
        answer = Answer(requests, service.name, True, body.stops, sites, (), count, n)
        return await service.answer(answer, body, http)


def _add_steering(app: FastAPI, service: Service) -> None:
    def find(name: str) -> ControlVector:
        try:
            return service.vectors[name]
        except SurgeryError as error:
            raise HTTPException(404, str(error)) from error

    @app.get("/v1/steering")
    async def steering() -> dict[str, Any]:
        return {
            "controls": describe_controls(service.lm, service.strengths),
            "captures": list(service.lm.opened.captures),
            "sites": [place.path for place in places(service.lm.opened)],
        }

    @app.get("/v1/steering/vectors")
    async def vectors() -> dict[str, Any]:
        return {"vectors": service.vectors.describe()}

    @app.post("/v1/steering/vectors", status_code=201)
    async def upload(http: Request, name: str = Query()) -> dict[str, Any]:
        kind = http.headers.get("content-type", "none")
        # Pages of other sites can send all other types.
        if kind.partition(";")[0] != "application/octet-stream":
            raise SurgeryError(
                "the header Content-Type: expected application/octet-stream. Received "
                f"{kind}. Send it."
            )
        data = await http.body()
        vector = await asyncio.to_thread(service.vectors.read, name, data)
        return {"name": name, "hidden_dim": vector.hidden_dim, "blocks": sorted(vector.directions)}

    @app.get("/v1/steering/vectors/{name}")
    async def vector(name: str) -> dict[str, Any]:
        directions = find(name).directions
        return {"name": name, "directions": {b: d.tolist() for b, d in directions.items()}}

    @app.delete("/v1/steering/vectors/{name}")
    async def delete(name: str) -> dict[str, Any]:
        find(name)
        service.vectors.delete(name)
        return {"name": name, "deleted": True}


def _add_state(app: FastAPI, service: Service) -> None:
    page = (Path(__file__).parent / "playground.html").read_text("utf-8")

    @app.get("/")
    async def playground() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise HTTPException(404, service.no_model(name))
        return service.model

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
