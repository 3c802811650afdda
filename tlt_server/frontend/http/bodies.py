"""The way from the bytes of a body to its struct."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from tlt_server.frontend.http.bounds import Bounds
from tlt_server.frontend.http.parsing import Forms, parse

Body = TypeVar("Body")


class Bodies:
    """Reads bodies within the server's limits."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    async def read(self, kind: type[Body] | Forms[Body], body: bytes) -> Body:
        return parse(kind, body, self._bounds)

    async def of(self, request: Request, kind: type[Body] | Forms[Body]) -> Body:
        """Read the body of a request, which may be left out: that means an empty object."""
        return await self.read(kind, await request.body() or b"{}")
