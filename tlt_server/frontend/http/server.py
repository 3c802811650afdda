"""The HTTP server: uvicorn's requests and replies, with our own listeners and connections.

Connections are counted when they are accepted, before a TLS handshake. Each loop iteration accepts
a few, so that the requests of earlier ones are read in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from tlt_server.config import Config
from tlt_server.frontend.http.connections import PROBES, PROBES_ONLY, OpenConnections, max_open
from tlt_server.frontend.http.keys import Certificates, Watched, server_context
from tlt_server.frontend.http.protocol import BoundedProtocol, bounded_protocol

BACKLOG = 2048
AT_ONCE = 16  # connections accepted in one iteration of the loop
PAUSE_S = 0.1  # before the next accept when the process has no descriptor left
# A silent connection may stay for longer than clients keep theirs (5 s to a minute): one that both
# sides end at once costs the client a request of which it does not know whether it was served.
KEEP_ALIVE_S = 75
FLUSH_S = 5  # time that replies in progress have to go out
POLL_S = 0.005


class Door:
    def __init__(
        self,
        listener: socket.socket,
        room: OpenConnections,
        protocol: Callable[[], BoundedProtocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener, self._room, self._protocol = listener, room, protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._arriving: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._arriving:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory is left
                self._room.make_room()
                self._loop.remove_reader(self._listener)
                self._paused = self._loop.call_later(
                    PAUSE_S, self._loop.add_reader, self._listener, self._accept
                )
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        protocol = self._protocol()
        if not self._room.opened(protocol):
            connection.close()
            return
        connection.setblocking(False)
        protocol.arriving = self._loop.create_task(self._hand_over(connection, protocol))
        self._arriving.add(protocol.arriving)
        protocol.arriving.add_done_callback(partial(self._handed_over, connection, protocol))

    async def _hand_over(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=protocol.header_timeout_s if self._context else None,
        )

    def _handed_over(
        self, connection: socket.socket, protocol: BoundedProtocol, task: asyncio.Task[None]
    ) -> None:
        """Close a connection that left, was dropped, or took too long to handshake."""
        self._arriving.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._room.closed(protocol)
            with contextlib.suppress(OSError):
                connection.close()
        if not isinstance(error, OSError | None):
            self._loop.call_exception_handler({"exception": error, "task": task})


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
        """Serve on bound sockets; `probes` answers only probes and scrapes."""
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
        """Send the replies in progress, for at most `FLUSH_S`, then leave."""
        for door in self._doors:
            door.close()
        self._uvicorn.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: our first signal drains, the second stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
