"""JSON in which an object has each name once: of two values of a name, one would be lost."""

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from backbone_surgery.files import without_repeats


class StrictRoute(APIRoute):
    """A route that refuses a body with a name twice."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """As of FastAPI, with a request that reads JSON so."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Any:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=without_repeats)
