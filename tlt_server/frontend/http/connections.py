"""The open connections of one port and the requests in progress, both bounded in number, and the
file descriptors that this process needs.

A connection has a request from the last byte of its headers to the last byte of the reply; at other
times it is silent. Silent connections cost other clients nothing: when a port is full, its longest
silent connection is closed. Some descriptors are held in reserve for the next engine.

A request has a place from its admission to the last byte of its reply, of HTTP and of gRPC apart;
keys share them (`process.turns.fits`).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.config import Config
from tlt_server.errors import NotFound, StartupError, Unavailable
from tlt_server.frontend.http.access import QUIET
from tlt_server.frontend.http.arrival import ARRIVE
from tlt_server.frontend.http.auth import key_of
from tlt_server.frontend.http.limits import BodyBudget, Refuse
from tlt_server.process.turns import OVER, fits

PROBES_ONLY = "probes_only"  # key in the scope's state: whether its port is the one for probes
PROBES = 64  # connections for probes, in addition to all others
RESERVE = 64  # pipes and sockets to one engine
SPARE = 448  # libraries, model files, uploads, what a closed connection holds for a moment
# gRPC's core accepts by itself: it closes connections above its limit, the newest first, and silent
# ones after header_timeout_s. So it has more room.
GRPC_SILENT = 3
LINK_CONNECTIONS = 64  # at most, although one gateway is attached
# Key in the scope's state: the stack that a transport closes which sends its reply only after the
# application has ended.
REPLIED = "replied"


def max_open(max_connections: int) -> int:
    """Return the number of connections that a port keeps open: as many silent ones as there may be
    with a request, plus those of probes.
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
        """Count a new connection. Return False if there is no room, since every other one has a
        request.
        """
        if len(self) >= self._max_open and not self.make_room():
            return False
        self._silent[connection] = None
        return True

    def make_room(self) -> bool:
        """Close the longest silent connection. Return False if there is none."""
        for connection in self._silent:
            del self._silent[connection]
            connection.drop()
            return True
        return False

    def asks(self, connection: Droppable) -> None:
        """Note that the headers have arrived."""
        self._silent.pop(connection, None)
        self._asking.add(connection)

    def rests(self, connection: Droppable) -> None:
        """Note that the reply is complete; the client may have left."""
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
    """Middleware that answers only probes and scrapes on a port of their own."""

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


def max_grpc_connections(config: Config) -> int:
    return (1 + GRPC_SILENT) * config.max_connections


def needed(config: Config) -> int:
    """Return the most descriptors that a server with these settings may use at once."""
    ports = max_open(config.max_connections)
    ports += PROBES if config.probe_port is not None else 0
    ports += max_grpc_connections(config) if config.grpc_port is not None else 0
    ports += LINK_CONNECTIONS if config.link_port is not None else 0
    return ports + config.max_rollouts + RESERVE + SPARE


def shortage(config: Config) -> str:
    """Return a message if the hard limit is below the settings' need; else an empty string."""
    need, limit = needed(config), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit not in range(need):  # RLIM_INFINITY is negative
        return ""
    return (
        f"this process may open {limit} files (the hard limit), and max_connections "
        f"{config.max_connections} with max_rollouts {config.max_rollouts} may need {need}; raise "
        f"the limit (ulimit -Hn {need}, LimitNOFILE, --ulimit nofile), or lower these settings"
    )


def raise_limit(config: Config) -> None:
    """Raise the soft limit to the hard one. `StartupError` if that is too low for the settings."""
    if short := shortage(config):
        raise StartupError(short)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems refuse "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Reserve:
    """Descriptors held open, so that a launch of the engine finds them available."""

    def __init__(self, size: int = RESERVE) -> None:
        self._size = size
        self._held: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Open the whole reserve. `OSError` if there are too few descriptors."""
        while len(self._held) < self._size:
            self._held.append(os.open(os.devnull, os.O_RDONLY))

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the reserve during a launch, and refill it with what is left afterwards.
        `OSError`, before the launch, if it was not complete.
        """
        self.fill()
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.fill()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


class Places:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()  # by owner

    def fits(self, owner: str) -> bool:
        """Return True if a key may have one more place."""
        owners = len(self._held.keys() | {owner})
        return fits(1, self._limit, self._held[owner], self._held.total(), owners)

    def is_due(self, owner: str) -> bool:
        """Return True if one more place is within a key's share."""
        return self._held[owner] < self._limit // len(self._held.keys() | {owner})

    def take(self, owner: str) -> None:
        self._held[owner] += 1

    def leave(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def full(self, owner: str) -> Unavailable:
        """Return the refusal of one more request of this key."""
        whose = (
            f", {self._held[owner] + 1} of them this key's" if self._held.keys() - {owner} else ""
        )
        return Unavailable(
            f"{self._held.total() + 1} requests are in progress{whose}; the limit is {self._limit} "
            "(max_connections): send fewer at once",
            retry_after_s=1,
        )

    def check(self) -> None:
        """Assert every invariant."""
        assert all(count > 0 for count in self._held.values())
        assert self._held.total() <= OVER * self._limit


class PlaceLimit:
    """Middleware that answers a request without a place with 503, unless a request with a stalled
    body makes room. Probes and scrapes are always answered.
    """

    def __init__(
        self, app: ASGIApp, *, max_connections: int, budget: BodyBudget, refuse: Refuse
    ) -> None:
        self.app, self.budget, self.refuse = app, budget, refuse
        self.http, self.rpc = Places(max_connections), Places(max_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in QUIET:
            await self.app(scope, receive, send)
            return
        places = self.rpc if ARRIVE in scope["state"] else self.http
        owner = key_of(scope)
        of = None if places.is_due(owner) else owner  # beyond its share, a key has only its own
        if not places.fits(owner) and not self.budget.make_place(of):
            await self.refuse(scope["path"], places.full(owner))(scope, receive, send)
            return
        places.take(owner)
        with contextlib.ExitStack() as ended:
            scope["state"].get(REPLIED, ended).callback(places.leave, owner)
            await self.app(scope, receive, send)
