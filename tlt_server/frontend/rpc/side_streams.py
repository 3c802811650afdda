"""The open streams of health and reflection, which callers may hold for as long as they like.

Health asks for no key, so these streams are bounded apart from the calls of the service. Above the
bound, the connection with most of them loses its oldest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc

from tlt_server.frontend.rpc.exchange import Context

Message = TypeVar("Message")


class SideStreams:
    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open: dict[str, dict[asyncio.Timeout, None]] = {}  # by connection, the oldest first

    async def bounded(
        self, context: Context, messages: AsyncIterator[Message]
    ) -> AsyncIterator[Message]:
        """Yield the messages of a stream until it ends or makes room for another."""
        try:
            async with asyncio.timeout(None) as wait:
                self._begin(context.peer(), wait)
                try:
                    async for message in messages:
                        yield message
                finally:
                    self._end(context.peer(), wait)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._max_open} streams of health and reflection are open (max_connections), "
                "and this connection had most of them: close some",
            )

    def _begin(self, connection: str, wait: asyncio.Timeout) -> None:
        self._open.setdefault(connection, {})[wait] = None
        if sum(map(len, self._open.values())) > self._max_open:
            most = max(self._open, key=lambda each: len(self._open[each]))
            oldest = next(iter(self._open[most]))
            self._end(most, oldest)
            oldest.reschedule(0.0)

    def _end(self, connection: str, wait: asyncio.Timeout) -> None:
        streams = self._open.get(connection, {})
        streams.pop(wait, None)
        if not streams:
            self._open.pop(connection, None)
