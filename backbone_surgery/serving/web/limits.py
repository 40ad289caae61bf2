"""Limits on the body of a request, however it is sent: its size, and the time it takes."""

import asyncio
import contextlib
from typing import Any

from fastapi.responses import JSONResponse

from backbone_surgery.serving.web.answers import error_body

MOST_SECONDS = 60.0
"""How long a body may take to come: a server that is to end waits for no longer."""


VECTORS = "/v1/steering/vectors"


class _RefusedError(Exception):
    """The rest of the body is not read."""


class BodyLimit:
    """Refuse bodies that are too large, without reading them whole, or too slow.

    Args:
        app: the application.
        most_bytes: how large a body may be, which JSON's parser takes seconds for; a vector may be
            four times as large.
    """

    def __init__(self, app: Any, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, count the bytes of its body, and wait for them no longer than may be.

        The connection of a refused one is closed, for what is left of its body.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + MOST_SECONDS
        count, is_whole, refused = 0, False, None
        most = self.most_bytes * (4 if scope["path"] == VECTORS else 1)

        async def limited() -> Any:
            nonlocal count, is_whole, refused
            try:
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                refused = 408, f"within {MOST_SECONDS:g} seconds. Received a part. Send all of it."
                raise _RefusedError from None
            count += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if count > most:
                refused = 413, f"of at most {most} bytes. Received more. Send less."
                raise _RefusedError
            return message

        async def unless_refused(message: Any) -> None:
            if refused is None:  # else it is the application's word for the error above
                await send(message)

        with contextlib.suppress(_RefusedError):
            await self.app(scope, limited, unless_refused)
        if refused is not None:
            status, text = refused
            body = error_body(f"the body: expected one {text}", "invalid_request_error")
            await JSONResponse(body, status, {"Connection": "close"})(scope, receive, send)
