"""The places of requests in progress, shared by key, for HTTP and for gRPC each.

A request has a place from its admission to the last byte of its reply. While no other key asks, a
key may have them all. Its share is the limit divided by the keys that have a place; a key within
its share gets in next to greedier ones, until all keys together have `OVER` times the limit.
"""

from __future__ import annotations

import contextlib
from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import Unavailable
from tlt_server.frontend.http.access import QUIET
from tlt_server.frontend.http.arrival import ARRIVE
from tlt_server.frontend.http.auth import key_of
from tlt_server.frontend.http.limits import BodyBudget, Refuse

# Key in the scope's state: the stack that a transport closes which sends its reply only after the
# application has ended.
REPLIED = "replied"
OVER = 2  # times the limit: the bound for keys within their shares


class Places:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()  # by owner

    def fits(self, owner: str) -> bool:
        """Return True if a key may have one more place."""
        taken = self._held.total()
        return taken < self._limit or (taken < OVER * self._limit and self.is_due(owner))

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
    """Middleware that answers a request without a place with 503, unless one whose body has stalled
    makes room. Probes and scrapes are always answered.
    """

    def __init__(
        self, app: ASGIApp, *, max_connections: int, budget: BodyBudget, refuse: Refuse
    ) -> None:
        self.app, self.budget, self.refuse = app, budget, refuse
        self.http, self.rpc = Places(max_connections), Places(max_connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
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
