"""The process of a server, which ends when what runs is finished and sent."""

import asyncio
import socket
import sys
from typing import Any

import uvicorn

from backbone_surgery.serving.engine import Engine

MOST_SECONDS = 60.0
"""How long a client may take to read what is left for it, once all texts are made."""


class Server(uvicorn.Server):
    """A server that does not wait for ever for a client that stopped reading.

    Args:
        config: of uvicorn.
        engine: that makes the texts.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, as upstream."""
        dropping = asyncio.create_task(self._drop_the_slow())
        try:
            await super().shutdown(sockets)
        finally:
            dropping.cancel()

    async def _drop_the_slow(self) -> None:
        while self.engine.stats.running or self.engine.stats.waiting:
            await asyncio.sleep(0.5)
        await asyncio.sleep(MOST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def run(app: Any, engine: Engine, host: str, port: int) -> None:
    """Serve an application until the process is told to end, as `uvicorn.run`."""
    server = Server(uvicorn.Config(app, host=host, port=port), engine)
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    if not server.started:
        sys.exit(3)
