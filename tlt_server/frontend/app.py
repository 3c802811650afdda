"""The HTTP application: the dialects' routes with their OpenAPI document, errors in the shape of
their route, and authentication and limits in front.

`Access` is outermost, so that it also records replies to refused requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from tlt_server.errors import Cancelled, MethodNotAllowed, NotFound, TltError
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.dialects.replies.errors import failure_naming
from tlt_server.frontend.http.access import QUIET, Access, Begin, untraced
from tlt_server.frontend.http.arrival import Arrival
from tlt_server.frontend.http.auth import Authentication, Gate, Origins, Terms, key_of
from tlt_server.frontend.http.connections import PlaceLimit, ProbesOnly
from tlt_server.frontend.http.endpoints import Endpoint
from tlt_server.frontend.http.limits import BodyBudget, BodyLimits
from tlt_server.frontend.http.openapi import document
from tlt_server.frontend.http.replies import ErrorResponse, error_reply, unexpected
from tlt_server.frontend.reading.asking import Asking
from tlt_server.frontend.service import Service
from tlt_server.settings.wording import nearest

ENVELOPE = failure_naming(())  # for paths below /v1 that have no route


def build_app(
    service: Service, gate: Gate, begin: Begin = untraced, dialects: Iterable[str] = DIALECTS
) -> ASGIApp:
    tables: dict[str, Sequence[Endpoint]] = {name: DIALECTS.resolve(name) for name in dialects}

    @cache
    def about() -> bytes:  # most servers are never asked, and describing takes 0.4 s
        return msgspec.json.encode(document(tables, keyed=gate.keyed))

    async def openapi(service: Service) -> Annotated[Response, dict[str, Any]]:
        """Return this document."""
        return Response(await asyncio.to_thread(about), media_type="application/json")

    tables["document"] = [Endpoint("GET", "/openapi.json", openapi, needs="any")]
    table = _Table([endpoint for endpoints in tables.values() for endpoint in endpoints])
    refusals = _Refusals(service, table)
    app = FastAPI(
        routes=[*table.endpoints],
        openapi_url=None,
        redirect_slashes=False,
        middleware=_middleware(service, gate, table, refusals),
        exception_handlers=refusals.handlers(),
    )
    app.state.service = service
    assert service.parsers  # `StartupError`: there is none of that name
    service.metrics.exchanges.ready.set_function(lambda: service.ready)
    reached = Origins(app, gate.origins) if gate.origins else app
    return Access(reached, service.metrics, table.template, begin)


class _Table:
    """All routes, found by path."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        operations = [(endpoint.method, endpoint.path) for endpoint in endpoints]
        assert len({*operations}) == len(operations), f"two routes are one of {operations}"
        self.endpoints = endpoints
        self.paths = sorted({endpoint.path for endpoint in endpoints})

    def at(self, path: str) -> list[Endpoint]:
        return [endpoint for endpoint in self.endpoints if endpoint.path_regex.match(path)]

    def terms(self, scope: Scope) -> Terms:
        """Return the terms of the route that the router will choose.

        If no route fits, any key may learn that; without a key, only for a path that has an open
        route with another method.
        """
        open_at_path = False
        for endpoint in self.endpoints:
            match, _ = endpoint.matches(scope)
            if match is Match.FULL:
                return Terms(endpoint.needs, endpoint.changes, endpoint.link)
            open_at_path |= match is Match.PARTIAL and endpoint.needs == "open"
        return Terms("open" if open_at_path else "any")

    def template(self, path: str) -> str:
        """Return the route's template for a path, or "none". The set is bounded, so it can label
        metrics.
        """
        found = (each.path for each in self.endpoints if each.path_regex.match(path))
        return next(found, "none")


class _Refusals:
    """Errors as replies, each in the shape of its route."""

    def __init__(self, service: Service, table: _Table) -> None:
        self._service, self._table = service, table

    def __call__(self, path: str, error: TltError, *, close: bool = False) -> Response:
        if self._table.template(path) not in QUIET:  # a probe's no is an answer, not a refusal
            self._service.rejected(error)
        unknown = ENVELOPE if path.startswith("/v1/") else error_reply
        shape = next((endpoint.error_shape for endpoint in self._table.at(path)), unknown)
        return ErrorResponse(error, shape, close=close)

    def handlers(self) -> dict[Any, Any]:
        """Return the handler of each kind of exception."""
        return {
            TltError: self._refused,
            HTTPException: self._no_such_route,
            ClientDisconnect: self._disconnected,
            Exception: self._broken,
        }

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, TltError)
        return self(request.url.path, error)

    async def _no_such_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, shown = request.url.path, request.scope["raw_path"].decode("latin-1")[:200]
        if error.status_code == 405:
            methods = ", ".join(endpoint.method for endpoint in self._table.at(path))
            message = f"{request.method[:20]} is not a method of {shown}; use {methods}"
            response = self(path, MethodNotAllowed(message))
            response.headers["allow"] = methods
            return response
        near = nearest(shown, self._table.paths)
        return self(
            path, NotFound(f"there is no {shown}{near}; GET /openapi.json lists the routes")
        )

    async def _disconnected(self, request: Request, error: Exception) -> Response:
        message = "the client disconnected before its body was complete"
        return self(request.url.path, Cancelled(message))

    async def _broken(self, request: Request, error: Exception) -> Response:
        return self(request.url.path, unexpected(error))


def _middleware(
    service: Service, gate: Gate, table: _Table, refusals: _Refusals
) -> list[Middleware]:
    """Return the middleware that a request passes before its handler, in order."""
    config, refuse = service.config, partial(refusals, close=True)
    budget = BodyBudget(config.max_bodies_mb * 2**20)
    return [
        Middleware(ProbesOnly, refuse=refuse),
        Middleware(
            Authentication,
            gate=gate,
            terms=table.terms,
            activity=service.engine.activity,
            refuse=refuse,
        ),
        Middleware(
            BodyLimits,
            max_body_bytes=config.max_body_mb * 2**20,
            budget=budget,
            body_timeout_s=config.body_timeout_s,
            reading=service.reading,
            refuse=refuse,
        ),
        Middleware(
            PlaceLimit, max_connections=config.max_connections, budget=budget, refuse=refuse
        ),
        Middleware(Asking, reader=lambda: service.reader, key_of=key_of),
        Middleware(Arrival, refuse=refuse),
    ]
