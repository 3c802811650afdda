"""The service `grpc.health.v1`: serving while a request sent now would be taken, as for `/readyz`,
and open to every caller like that route.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from tlt_server.frontend.dialects.events import changes
from tlt_server.frontend.link.changes import Changes
from tlt_server.frontend.rpc.exchange import Context
from tlt_server.frontend.rpc.methods import SERVICE
from tlt_server.frontend.rpc.side_streams import SideStreams


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
