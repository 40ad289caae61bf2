"""How errors are answered: in OpenAI's shape, in words for a client."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.request import TooLongError
from backbone_surgery.serving.scheduler import ModelChangedError, QueueFullError
from backbone_surgery.serving.web.answers import error_body, failure_body
from backbone_surgery.serving.web.body import (
    ChatCompletion,
    Detokenize,
    TextCompletion,
    Tokenize,
)
from backbone_surgery.serving.web.mistakes import describe

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": TextCompletion,
    "/v1/chat/completions": ChatCompletion,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}
"""What is sent to each route."""


def add_errors(app: FastAPI, length: int) -> None:
    """Add the answers to errors, in OpenAI's shape.

    Args:
        app: the application.
        length: tokens that a request may have.
    """

    @app.exception_handler(QueueFullError)
    async def full(http: Request, error: QueueFullError) -> JSONResponse:
        text = (
            "this server: expected fewer requests at once. Received one more than may wait. Try "
            "again later."
        )
        return answer(429, text, headers={"Retry-After": "1"})

    @app.exception_handler(ModelChangedError)
    async def changed(http: Request, error: ModelChangedError) -> JSONResponse:
        return answer(500, "this server: its model was quantised since it began. Start it anew.")

    @app.exception_handler(TooLongError)
    async def too_long(http: Request, error: TooLongError) -> JSONResponse:
        text = (
            f"prompt: expected at most {length} tokens with the new ones, as many as this server "
            f"takes (its `--length`, as far as the model has positions). Received {error.needed}. "
            "Shorten it, or ask for fewer."
        )
        return answer(400, text)

    @app.exception_handler(SurgeryError)
    async def refused(http: Request, error: SurgeryError) -> JSONResponse:
        return answer(400, str(error))

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> JSONResponse:
        detail = error.detail
        if error.status_code == 400:  # FastAPI's own, of what Python's parser of JSON refuses
            detail = (
                "expected a body of JSON in UTF-8, with each name once in an object. Received "
                f"another ({error.__cause__}). Change it."
            )
        text = f"{http.method} {http.scope['path']}: {detail}"
        return answer(error.status_code, text, headers=error.headers)

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> JSONResponse:
        return JSONResponse(failure_body(error), 500)

    @app.exception_handler(RequestValidationError)
    async def malformed(http: Request, error: RequestValidationError) -> JSONResponse:
        if isinstance(error.body, bytes):  # pages of other sites can send all but the header
            sent = http.headers.get("content-type", "none")
            text = f"the header Content-Type: expected application/json. Received {sent}. Send it."
            return answer(400, text)
        body = _BODIES.get(http.scope["path"])  # a route of vectors has none, but a parameter
        name, text = describe(error, () if body is None else body.model_fields)
        return answer(400, text, name)


def answer(
    status: int, message: str, param: str | None = None, headers: Any = None
) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return JSONResponse(error_body(message, kind, param), status, headers)
