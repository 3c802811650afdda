"""The open connections of one port, bounded in number, and the bound on those with a request.

A connection has a request from the last byte of its headers to the last byte of the reply; before
and after, it is silent. Silence costs no other client: when a port is full, its longest silent
connection is closed.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import NotFound, TltError, Unavailable
from tlt_server.frontend.http.access import QUIET
from tlt_server.frontend.http.budget import BodyBudget
from tlt_server.frontend.http.limits import Refuse

# Keys in the scope's state: how many connections had a request when this one's headers had come,
# itself included; and whether its port is the one for probes.
CONNECTIONS, PROBES_ONLY = "connections", "probes_only"
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

    def asks(self, connection: Droppable) -> int:
        """Note that the headers have come, and return how many connections have a request."""
        self._silent.pop(connection, None)
        self._asking.add(connection)
        return len(self._asking)

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


class ConnectionLimit:
    """Middleware that answers requests above the limit with 503 and closes their connections,
    unless one whose body has stalled makes place. Probes and scrapes are always answered, and
    nothing else is on a port of their own.
    """

    def __init__(
        self, app: ASGIApp, *, max_connections: int, budget: BodyBudget, refuse: Refuse
    ) -> None:
        self.app, self.max_connections, self.refuse = app, max_connections, refuse
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, path = scope.get("state", {}), scope.get("path", "")
        connections = state.get(CONNECTIONS, 0)
        error: TltError | None = None
        if path not in QUIET and state.get(PROBES_ONLY, False):
            error = NotFound(
                f"there is no {path[:200]} on the port for probes (probe_port), which answers "
                f"{', '.join(sorted(QUIET))}; ask the server's other port"
            )
        elif (
            path not in QUIET
            and connections > self.max_connections
            and not self.budget.make_place()
        ):
            error = Unavailable(
                f"{connections} requests are in progress; the limit is {self.max_connections} "
                "(max_connections): send fewer at once",
                retry_after_s=1,
            )
        if error is not None:
            await self.refuse(path, error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
