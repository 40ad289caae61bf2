"""How errors are answered: in OpenAI's shape, in words for a client."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.generation.request import TooLongError
from backbone_surgery.serving.scheduler import QueueFullError
from backbone_surgery.serving.web.answers import error_body, failure_body
from backbone_surgery.serving.web.body import ChatCompletion, TextCompletion


def add_errors(app: FastAPI, length: int) -> None:
    """Add the answers to errors, in OpenAI's shape.

    Args:
        app: the application.
        length: tokens that a request may have.
    """

    def answer(
        status: int, message: str, param: str | None = None, headers: Any = None
    ) -> JSONResponse:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "invalid_request_error"
        )
        return JSONResponse(error_body(message, kind, param), status, headers)

    @app.exception_handler(QueueFullError)
    async def full(http: Request, error: QueueFullError) -> JSONResponse:
        return answer(429, str(error), headers={"Retry-After": "1"})

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
        text = f"{http.method} {http.scope['path']}: {error.detail}"
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
        first = max(error.errors(), key=_depth)
        _, *path = first["loc"]
        name, received = "body", error.body
        if path and isinstance(path[0], str):
            name, received = path[0], first["input"]
        if first["type"] == "extra_forbidden" and len(path) == 1:
            is_text = http.scope["path"] == "/v1/completions"
            fields = (TextCompletion if is_text else ChatCompletion).model_fields
            return answer(400, f"'{name}' is not a known field. {closest(name, fields)}", name)
        where = ".".join([f"'{name}'", *map(str, path[1:])])
        return answer(400, f"{where}: {first['msg']}. Received {shown(received)}.", name)


def _depth(error: Mapping[str, Any]) -> tuple[int, bool]:
    """Tell how deep a value fits the type that an error is of; of several, the deepest was meant.

    What has the right type, and is too long, say, fits deeper than what has another.
    """
    return len(error["loc"]), not error["type"].endswith("_type")
