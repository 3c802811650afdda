"""The open connections of one port, bounded in number.

A connection has a request from the last byte of its headers to the last byte of the reply; before
and after, it is silent. Silence costs no other client: when a port is full, its longest silent
connection is closed.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import NotFound
from tlt_server.frontend.http.access import QUIET
from tlt_server.frontend.http.limits import Refuse

PROBES_ONLY = "probes_only"  # key in the scope's state: whether its port is the one for probes
PROBES = 64  # connections for probes, in addition to all others


def max_open(max_connections: int) -> int:
    """Return how many connections a port keeps open: as many silent ones as there may be with a
    request, and those of probes.
    """
    return 2 * max_connections + PROBES


class Droppable(Protocol):
    def drop(self) -> None:
        """Close the connection at once."""


class OpenConnections:
    """The connections of one port. Each is in exactly one of two sets."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._silent: dict[Droppable, None] = {}  # the longest silent one first
        self._asking: set[Droppable] = set()

    def __len__(self) -> int:
        return len(self._silent) + len(self._asking)

    def opened(self, connection: Droppable) -> bool:
        """Count a new connection. False: there is no room, since every other has a request."""
        if len(self) >= self._max_open and not self.make_room():
            return False
        self._silent[connection] = None
        return True

    def make_room(self) -> bool:
        """Close the longest silent connection; return whether there was one."""
        for connection in self._silent:
            del self._silent[connection]
            connection.drop()
            return True
        return False

    def asks(self, connection: Droppable) -> None:
        """Note that the headers have come."""
        self._silent.pop(connection, None)
        self._asking.add(connection)

    def rests(self, connection: Droppable) -> None:
        """Note that the reply is complete, which may also be after the client has left."""
        if connection in self._asking:
            self._asking.remove(connection)
            self._silent[connection] = None

    def closed(self, connection: Droppable) -> None:
        self._silent.pop(connection, None)
        self._asking.discard(connection)

    def check(self) -> None:
        assert not self._silent.keys() & self._asking
        assert len(self) <= self._max_open


class ProbesOnly:
    """Middleware that answers probes and scrapes only on a port of their own."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self.app, self.refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path in QUIET or not scope.get("state", {}).get(PROBES_ONLY, False):
            await self.app(scope, receive, send)
            return
        error = NotFound(
            f"there is no {path[:200]} on the port for probes (probe_port), which answers "
            f"{', '.join(sorted(QUIET))}; ask the server's other port"
        )
        await self.refuse(path, error)(scope, receive, send)
