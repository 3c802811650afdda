"""The HTTP server: uvicorn's requests and replies, our own doors and connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from tlt_server.config import Config
from tlt_server.frontend.http.connections import PROBES, PROBES_ONLY, OpenConnections, max_open
from tlt_server.frontend.http.door import Door
from tlt_server.frontend.http.protocol import bounded_protocol
from tlt_server.frontend.http.tls import Certificates, server_context
from tlt_server.frontend.http.watched import Watched

# A silent connection may stay for longer than clients keep theirs (5 s to a minute): one that both
# sides end at once costs the client a request of which it does not know whether it was served.
KEEP_ALIVE_S = 75
FLUSH_S = 5  # time that replies in progress have to go out
POLL_S = 0.005


class HttpServer:
    def __init__(
        self, app: ASGIApp, config: Config, certificates: Watched[Certificates] | None
    ) -> None:
        self._config, self._certificates = config, certificates
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self._doors: list[Door] = []

    async def start(self, listener: socket.socket, probes: socket.socket | None) -> None:
        """Serve on bound sockets, `probes` with nothing but probes and scrapes."""
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[]))
        while not self._uvicorn.started:  # noqa: ASYNC110 (uvicorn offers a flag only)
            await asyncio.sleep(POLL_S)
        self._open(listener, max_open(self._config.max_connections))
        if probes is not None:
            self._open(probes, PROBES, probes_only=True)

    def _open(self, listener: socket.socket, most: int, *, probes_only: bool = False) -> None:
        room = OpenConnections(most)
        kind, loop = bounded_protocol(self._config, room), asyncio.get_running_loop()
        door = Door(
            listener,
            room,
            lambda: kind(
                self._uvicorn.config,
                self._uvicorn.server_state,
                {PROBES_ONLY: True} if probes_only else {},
                loop,
            ),
            server_context(self._certificates) if self._certificates is not None else None,
        )
        door.open()
        self._doors.append(door)

    async def stop(self) -> None:
        """Let replies in progress go out, for `FLUSH_S`, then leave."""
        for door in self._doors:
            door.close()
        self._uvicorn.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    """Signals are ours: the first one drains, the second one stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
