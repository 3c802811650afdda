"""A listening socket whose connections are counted when they are accepted, before a TLS handshake.

Each loop iteration accepts a few, so that the requests of those before are read in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial

from tlt_server.frontend.http.connections import OpenConnections
from tlt_server.frontend.http.protocol import BoundedProtocol

BACKLOG = 2048
AT_ONCE = 16  # connections accepted in one iteration of the loop
PAUSE_S = 0.1  # before the next accept when the process has no descriptor left


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
        """Close a connection that left, was dropped, or took too long to say hello."""
        self._arriving.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._room.closed(protocol)
            with contextlib.suppress(OSError):
                connection.close()
        if not isinstance(error, OSError | None):
            self._loop.call_exception_handler({"exception": error, "task": task})
