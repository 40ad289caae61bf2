"""Who may use the server: those who bring its key."""

import base64
import hmac
from typing import Any

from starlette.datastructures import Headers

from backbone_surgery.serving.web.errors import answer

_TEXT = (
    "expected the API key of this server. Received none, or another. Send it as `Authorization: "
    "Bearer KEY`."
)


class KeyCheck:
    """Refuse a request without the key, but for `/health`, before its body is read.

    Args:
        app: the application.
        api_key: that requests have to bring; `None` lets all in.
    """

    def __init__(self, app: Any, api_key: str | None) -> None:
        self.app, self.api_key = app, api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it."""
        is_open = self.api_key is None or scope["type"] != "http" or scope["path"] == "/health"
        if is_open or self._is_key(Headers(scope=scope).get("authorization", "")):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": 'Basic realm="API key"'}
        text = f"{scope['method']} {scope['path']}: {_TEXT}"
        await answer(401, text, headers=headers)(scope, receive, send)

    def _is_key(self, authorization: str) -> bool:
        """Compare a header with the key; it takes the same time however wrong it is."""
        kind, _, value = authorization.partition(" ")
        if kind.lower() == "basic":  # a browser asks for a password, and sends it so
            try:
                value = base64.b64decode(value).decode().partition(":")[2]
            except ValueError:
                value = ""
        return hmac.compare_digest(value.encode(), str(self.api_key).encode())
