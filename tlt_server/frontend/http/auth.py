"""Authentication: which caller may use which route, and a check that no web page of another site
acts through a browser of this machine or network.

A route states its scope (`Endpoint.needs`); a caller needs a key to learn that a path has no route.
A server without keys serves the programs of this machine with all scopes.

A browser reports in `Sec-Fetch-Site` and `Origin` which page sent a request. `Authentication`
refuses requests of another site's page, on every route that is not open, unless the setting
`allowed_origins` lists its Origin; `Origins` tells the browser so. On a server without keys the
header Host must name this machine too, since a foreign name may lead to a loopback address.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import Forbidden, TltError, Unauthenticated
from tlt_server.frontend.http.keys import EVERYBODY, NOBODY, Caller, Needs, watched_keys
from tlt_server.metrics import Metrics
from tlt_server.samples.activity import Activity
from tlt_server.settings.addresses import PORTS, is_loopback

if TYPE_CHECKING:
    from tlt_server.config import Config

OWN_SITES = frozenset({"none", "same-origin"})  # typed by the user; a page of this server
PREFLIGHT_KEPT_S = 7200  # the longest that Chromium keeps one
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"(https?)://(.*)")
ADMITTED = "admitted"  # key in the scope's state


class Foreign(NamedTuple):
    """The reason to refuse a request: a label of the metric, and the sentence for the sender."""

    reason: Literal["foreign_name", "foreign_page"]
    message: str


class _Authority(NamedTuple):
    host: str  # in lower case, an IPv6 address without brackets
    port: str  # empty: none is given


class Origins:
    """Middleware that lets the browser show the replies, errors too, to pages of listed origins.

    Their preflights are answered here, before keys and limits. Cookies and other credentials that
    a browser keeps are never allowed, only those that the page itself sends.
    """

    def __init__(self, app: ASGIApp, listed: Collection[str]) -> None:
        self._app, self._listed = app, listed
        self._answering = CORSMiddleware(
            app,
            allow_origins=listed,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["*"],
            max_age=PREFLIGHT_KEPT_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "OPTIONS" or self._lists(scope):
            await self._answering(scope, receive, send)
        else:  # also a preflight of another page, which is refused as its request would be
            await self._app(scope, receive, send)

    def _lists(self, scope: Scope) -> bool:
        return _is_listed(_values(scope, b"origin"), self._listed)


def shown_to(headers: Iterable[tuple[bytes, bytes]], listed: Collection[str]) -> dict[str, str]:
    """Return the headers that show a page of a listed origin the refusal of a request that no
    middleware sees. `headers`: those that were read.
    """
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not listed:
        return {}
    if not _is_listed(origins, listed):
        return {"vary": "Origin"}
    shown = {"access-control-allow-origin": origins[0], "access-control-expose-headers": "*"}
    return {"vary": "Origin", **shown}


def foreign(scope: Scope, *, keyed: bool, listed: Collection[str]) -> Foreign | None:
    """Return the reason why a page of an unlisted site may have sent the request, or None."""
    hosts, sites = _values(scope, b"host"), _values(scope, b"sec-fetch-site")
    for host in () if keyed else hosts:
        if host and not _is_own(host):
            return Foreign(
                "foreign_name",
                f"the header Host is {host[:100]!r}; a server without API keys answers to "
                "localhost only: call it by that name, or start it with --api-key-file",
            )
    if _is_listed(_values(scope, b"origin"), listed):
        return None
    for site in sites:
        if site.lower() not in OWN_SITES:
            return Foreign(
                "foreign_page",
                f"the header Sec-Fetch-Site is {site[:100]!r}; pages of other sites may not call "
                "this server: open its own page, call it from a program, or list the page's origin "
                "in --allowed-origins",
            )
    # A proxy may send another Host than the browser did, which then vouches in Sec-Fetch-Site.
    # A gRPC call has no Host.
    if keyed and (sites or not hosts):
        return None
    for origin in _values(scope, b"origin"):
        if not any(_is_like(origin, host) for host in hosts):
            return Foreign(
                "foreign_page",
                f"the header Origin is {origin[:100]!r} and Host is {', '.join(hosts)[:100]!r}; "
                "pages of other sites may not call this server: open its own page, call it from a "
                "program without an Origin, or list the origin in --allowed-origins",
            )
    return None


def _is_listed(origins: list[str], listed: Collection[str]) -> bool:
    return len(origins) == 1 and origins[0] in listed


def _is_own(host: str) -> bool:
    authority = _authority(host)
    return authority is not None and is_loopback(authority.host)


def _is_like(origin: str, host: str) -> bool:
    """Return True if an Origin names the host and port of a Host header."""
    parts = _ORIGIN.fullmatch(origin)
    if parts is None:
        return False
    port = PORTS[parts[1]]
    ours, theirs = _authority(host), _authority(parts[2])
    return (
        ours is not None
        and theirs is not None
        and ours.host == theirs.host
        and (ours.port or port) == (theirs.port or port)
    )


def _authority(text: str) -> _Authority | None:
    """Parse a name or address with an optional port; None if it is anything else."""
    parts = _AUTHORITY.fullmatch(text)
    return _Authority(parts[1].strip("[]").lower(), parts[2] or "") if parts is not None else None


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


class Terms(NamedTuple):
    """The scope that a route needs, whether the route changes state, and whether the scope `link`
    suffices, too.
    """

    needs: Needs
    changes: bool = False
    link: bool = False


class Admitted(NamedTuple):
    """The caller of an admitted request and the terms of its route."""

    caller: Caller
    terms: Terms


class Gate:
    """Decides whether a token is admitted, for every transport."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._keys, self._metrics = (
            watched_keys(config, partial(metrics.exchanges.file_read, "api_keys")),
            metrics,
        )
        self.origins = config.origins  # pages of other sites that may call

    @property
    def keyed(self) -> bool:
        return self._keys is not None

    def admit(self, token: str, needs: Needs, *, link: bool = False) -> Caller:
        """Return the caller whose token this is; an empty token is no token. `link`: the scope
        `link` suffices, too.

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
        if needs != "any" and not (caller.may(needs) or (link and caller.may("link"))):
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
    """Middleware that passes on admitted requests, and records the caller for handlers. A request
    for work is reported before its body is read, so that the drafter's trainer makes room.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        terms: Callable[[Scope], Terms],
        activity: Activity,
        refuse: Callable[[str, TltError], ASGIApp],
    ) -> None:
        """`terms(scope)`: returns the terms of a request's route. `refuse(path, error)`: returns
        the reply that closes the connection.
        """
        self.app, self.gate, self.terms = app, gate, terms
        self.activity, self.refuse = activity, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        terms = self.terms(scope)
        try:
            keyed, listed = self.gate.keyed, self.gate.origins
            page = None if terms.needs == "open" else foreign(scope, keyed=keyed, listed=listed)
            if page is not None:
                self.gate.refused(page.reason)
                raise Forbidden(page.message)
            token = bearer(next(iter(_values(scope, b"authorization")), ""))
            caller = self.gate.admit(token, terms.needs, link=terms.link)
        except TltError as error:
            await self.refuse(scope["path"], error)(scope, receive, send)
        else:
            scope.setdefault("state", {})[ADMITTED] = Admitted(caller, terms)
            if caller.name:
                # Every log line about this request has the name.
                structlog.contextvars.bind_contextvars(key=caller.name)
            works = terms.needs == "data"
            with self.activity.during("requests") if works else contextlib.nullcontext():
                await self.app(scope, receive, send)


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
