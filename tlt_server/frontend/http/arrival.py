"""The arrival of a message that contains path, query and body together, like gRPC's messages.

The message is read after authentication and limits and before the router; until then the scope has
the template of the path. `ARRIVE` in the scope's state is the function that turns the message into
the parts of an HTTP request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt_server.errors import TltError
from tlt_server.frontend.http.limits import Refuse

ARRIVE = "arrive"


class Arrived(NamedTuple):
    """The parts of an HTTP request in a message."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


Arrive = Callable[[bytes], Awaitable[Arrived]]


class Arrival:
    """Middleware that reads the message, if the transport has one."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self.app, self.refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrive: Arrive | None = scope.get("state", {}).get(ARRIVE)
        if arrive is None:
            await self.app(scope, receive, send)
            return
        try:
            arrived = await arrive((await receive()).get("body", b""))
        except TltError as error:
            await self.refuse(scope["path"], error)(scope, receive, send)
            return
        scope.update(
            {
                "method": arrived.method,
                "path": arrived.path,
                "raw_path": quote(arrived.path).encode(),
                "query_string": arrived.query.encode(),
                "headers": [
                    *scope["headers"],
                    *((name.encode(), value.encode()) for name, value in arrived.headers),
                ],
            }
        )
        body: Message | None = {"type": "http.request", "body": arrived.body, "more_body": False}

        async def replayed() -> Message:
            nonlocal body
            message, body = body, None
            return message if message is not None else await receive()

        await self.app(scope, replayed, send)
