"""Authentication: which caller may use which route.

A route states what it needs (`Endpoint.needs`); a caller needs a key to learn that a path has no
route. A server without keys serves the programs of this machine with all scopes. What a web page of
another site makes a browser send is refused in either case (`browsers`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import Forbidden, TltError, Unauthenticated
from tlt_server.frontend.http.browsers import foreign
from tlt_server.frontend.http.keys import EVERYBODY, NOBODY, Caller, Needs, watched_keys
from tlt_server.metrics import Metrics

if TYPE_CHECKING:
    from tlt_server.config import Config

ADMITTED = "admitted"  # key in the scope's state


class Terms(NamedTuple):
    """The scope that a route needs, and whether the route changes state."""

    needs: Needs
    changes: bool = False


class Admitted(NamedTuple):
    """The caller of an admitted request and the terms of its route."""

    caller: Caller
    terms: Terms


class Gate:
    """The decision whether a token is admitted, for every transport."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._keys, self._metrics = (
            watched_keys(config, partial(metrics.exchanges.file_read, "api_keys")),
            metrics,
        )
        self.origins = config.origins  # pages of other sites that may call

    @property
    def keyed(self) -> bool:
        return self._keys is not None

    def admit(self, token: str, needs: Needs) -> Caller:
        """Return the caller whose token this is; an empty token is no token.

        Raise `Unauthenticated` if no key fits, `Forbidden` if the caller lacks the scope.
        """
        if needs == "open":
            return NOBODY
        if self._keys is None:
            return EVERYBODY
        caller = self._keys().find(token)
        if caller is None:
            self.refused("unknown_key" if token else "no_key")
            raise Unauthenticated(
                "the request carries no known API key; send the header Authorization: Bearer <key>"
            )
        if needs != "any" and not caller.may(needs):
            self.refused("scope")
            raise Forbidden(
                f"the key {caller.name} has the scopes {', '.join(sorted(caller.scopes))}, and "
                f"this needs {needs}; use another key, or have this one given "
                f"scopes={','.join(sorted({*caller.scopes, needs}))}"
            )
        return caller

    def refused(self, reason: str) -> None:
        self._metrics.exchanges.auth_refusals.labels(reason).inc()


class Authentication:
    """Middleware that lets through what the gate admits, and records the caller for handlers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        terms: Callable[[Scope], Terms],
        refuse: Callable[[str, TltError], ASGIApp],
    ) -> None:
        """`terms(scope)` returns the terms of a request's route. `refuse(path, error)` returns the
        reply that closes the connection.
        """
        self.app, self.gate, self.terms, self.refuse = app, gate, terms, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        terms = self.terms(scope)
        try:
            if terms.needs != "open":
                self._check_browser(scope)
            caller = self.gate.admit(bearer(_header(scope, b"authorization")), terms.needs)
        except TltError as error:
            await self.refuse(scope["path"], error)(scope, receive, send)
        else:
            scope.setdefault("state", {})[ADMITTED] = Admitted(caller, terms)
            if caller.name:
                # Every log line about this request has the name.
                structlog.contextvars.bind_contextvars(key=caller.name)
            await self.app(scope, receive, send)

    def _check_browser(self, scope: Scope) -> None:
        found = foreign(scope, keyed=self.gate.keyed, listed=self.gate.origins)
        if found is not None:
            self.gate.refused(found.reason)
            raise Forbidden(found.message)


def caller_of(request: Request) -> Caller:
    admitted: Admitted = request.scope["state"][ADMITTED]
    return admitted.caller


def key_of(scope: Scope) -> str:
    """Return the name of the key of an admitted request; empty without one."""
    admitted: Admitted = scope["state"][ADMITTED]
    return admitted.caller.name


def is_change(scope: Scope) -> bool:
    """Return True if a request was admitted to a route that changes state."""
    admitted: Admitted | None = scope.get("state", {}).get(ADMITTED)
    return admitted is not None and admitted.terms.changes


def bearer(authorization: str) -> str:
    """Return the token of an Authorization header, or an empty string."""
    kind, _, token = authorization.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
