"""The service `grpc.health.v1`: serving while a request sent now would be accepted, like `/readyz`,
and open to every caller like that route.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from tlt_server.frontend.dialects.operate import changes
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.rpc.exchange import Context
from tlt_server.frontend.rpc.methods import SERVICE

Message = TypeVar("Message")
Ending: TypeAlias = asyncio.Future[None]


class SideStreams:
    """The open streams of health and reflection, which callers may hold indefinitely.

    Health needs no key, so these streams are bounded separately from the service's calls. Above the
    bound, the connection with the most streams loses its oldest.

    The handler outlives the task that creates and writes the messages, and does not use the context
    after the call: gRPC frees the call when the handler ends, and reading its peer then crashes. A
    generator would be closed too late if its reader is cancelled.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open: dict[str, dict[Ending, None]] = {}  # by connection, the oldest first

    async def send(self, context: Context, messages: AsyncGenerator[Message, None]) -> None:
        """Send the messages of a stream until it ends or makes room for another."""
        connection = context.peer()
        # Sent first, so that no status has to wait for a message that carries them.
        await context.send_initial_metadata(())
        ending: Ending = asyncio.get_running_loop().create_future()
        sending = asyncio.ensure_future(_write(context, messages))
        self._begin(connection, ending)
        try:
            await asyncio.wait({sending, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._max_open} streams of health and reflection are open "
                    "(max_connections), and this connection had most of them: close some",
                )
        finally:
            self._end(connection, ending)
            sending.cancel()
            await asyncio.wait({sending})
        if not sending.cancelled():
            sending.result()

    def _begin(self, connection: str, ending: Ending) -> None:
        self._open.setdefault(connection, {})[ending] = None
        if sum(map(len, self._open.values())) > self._max_open:
            most = max(self._open, key=lambda each: len(self._open[each]))
            oldest = next(iter(self._open[most]))
            self._end(most, oldest)
            oldest.set_result(None)

    def _end(self, connection: str, ending: Ending) -> None:
        streams = self._open.get(connection, {})
        streams.pop(ending, None)
        if not streams:
            self._open.pop(connection, None)


async def _write(context: Context, messages: AsyncGenerator[Message, None]) -> None:
    async with contextlib.aclosing(messages):
        async for message in messages:
            await context.write(message)


class Health(HealthServicer):
    """The health of the server and of its one service."""

    def __init__(self, is_ready: Callable[[], bool], told: Changes, streams: SideStreams) -> None:
        self._is_ready, self._told, self._streams = is_ready, told, streams
        self._stopping = False  # ends the streams

    def stop(self) -> None:
        """End the streams."""
        self._stopping = True
        self._told.tell()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in ("", SERVICE.full_name):
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"there is no service {request.service[:80]!r}; ask for {SERVICE.full_name}, "
                "or without a name for the server",
            )
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        await self._streams.send(context, self._replies(request.service))

    async def _replies(self, service: str) -> AsyncGenerator[HealthCheckResponse, None]:
        async for status in changes(
            lambda: None if self._stopping else self._status(service), self._told, math.inf
        ):
            if status is None:
                return
            yield HealthCheckResponse(status=status)

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service not in ("", SERVICE.full_name):
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._is_ready() else HealthCheckResponse.NOT_SERVING
