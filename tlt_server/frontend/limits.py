"""Finite by default, whatever the path: how many connections there are, how large a body is, how slow its sender may be.

Both wrap the app; what no application sees (headers, replies left unread) is bounded in `protocol`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt_server.errors import InvalidRequest, RequestTimeout, TltError, TooLarge, Unavailable

Refuse = Callable[[str, TltError], ASGIApp]  # the answer in the shape of the path
CONNECTIONS = "connections"  # in the scope's state: how many there were when this one was made, itself included


class ConnectionLimit:
    """Answers requests on connections above the limit with 503, and closes these."""

    def __init__(self, app: ASGIApp, *, max_connections: int, refuse: Refuse) -> None:
        self.app, self.max_connections, self.refuse = app, max_connections, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connections = scope.get("state", {}).get(CONNECTIONS, 0)
        if connections > self.max_connections:
            error = Unavailable(f"{connections} connections are open; the limit is {self.max_connections} (max_connections): use "
                                "connections again, or fewer at once", retry_after_s=1)
            await self.refuse(scope["path"], error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class BodyLimits:
    """Refuses a body before it is all here: 413 when it is too large, 408 when it is too slow. Then the connection is closed, so
    that what is left of the body is never read."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float, refuse: Refuse) -> None:
        self.app, self.refuse = app, refuse
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            declared = _content_length(scope)
            if declared > self.max_body_bytes:
                raise _too_large(f"{declared} bytes", self.max_body_bytes)
        except TltError as error:
            await self.refuse(scope["path"], error)(scope, receive, send)
            return
        body = _Body(receive, self.max_body_bytes, self.body_timeout_s, complete=declared == 0 and not _chunked(scope))

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.complete:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, body.receive, closing_send)


class _Body:
    """A request body as it arrives, counted and timed."""

    def __init__(self, receive: Receive, limit_bytes: int, timeout_s: float, *, complete: bool) -> None:
        self.complete = complete
        self._receive, self._limit_bytes, self._timeout_s = receive, limit_bytes, timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {self._timeout_s:g} s (body_timeout_s); send it faster, "
                                 "or in smaller requests") from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            if self._bytes > self._limit_bytes:
                self.complete = False
                raise _too_large(f"more than {self._limit_bytes} bytes", self._limit_bytes)
        return message


def _too_large(size: str, limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body has {size}; the limit is {limit_bytes} bytes (max_body_mb): split the request")


def _chunked(scope: Scope) -> bool:
    return any(name == b"transfer-encoding" for name, _ in scope["headers"])


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                raise InvalidRequest(f"Content-Length is {value[:40]!r}; it must be a number of bytes")
            return int(value)
    return 0
