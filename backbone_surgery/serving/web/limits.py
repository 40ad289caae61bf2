"""A limit on the body of a request, however it is sent."""

import contextlib
from typing import Any

from fastapi.responses import JSONResponse

from backbone_surgery.serving.web.answers import error_body


class _TooLargeError(Exception):
    """The body is larger than it may be."""


class BodyLimit:
    """Refuse bodies that are too large, without reading them whole.

    Args:
        app: the application.
        most_bytes: how large a body may be.
    """

    def __init__(self, app: Any, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and count the bytes of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        count, refused = 0, False

        async def counted() -> Any:
            nonlocal count, refused
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most_bytes:
                refused = True
                raise _TooLargeError
            return message

        async def unless_refused(message: Any) -> None:
            if not refused:  # else it is the application's word for the error above
                await send(message)

        with contextlib.suppress(_TooLargeError):
            await self.app(scope, counted, unless_refused)
        if refused:
            text = f"the body: expected at most {self.most_bytes} bytes. Received more."
            response = JSONResponse(error_body(text, "invalid_request_error"), 413)
            await response(scope, receive, send)
