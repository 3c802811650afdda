"""The HTTP application: the dialects' routes and the document of them, errors in each route's
shape, authentication and limits around.

What is kept of a request (`access`) is outermost: it also sees the replies to requests that nothing
else let in.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from tlt_server.config import nearest
from tlt_server.errors import Cancelled, MethodNotAllowed, NotFound, TltError
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.http.access import QUIET, Access
from tlt_server.frontend.http.arrival import Arrival
from tlt_server.frontend.http.auth import Authentication, Gate
from tlt_server.frontend.http.endpoints import Endpoint
from tlt_server.frontend.http.keys import Needs
from tlt_server.frontend.http.limits import BodyLimits, ConnectionLimit
from tlt_server.frontend.http.openapi import document
from tlt_server.frontend.http.replies import ErrorResponse, error_reply, unexpected
from tlt_server.frontend.service import Service


def build_app(service: Service, gate: Gate, dialects: Iterable[str] = DIALECTS) -> ASGIApp:
    tables: dict[str, list[Endpoint]] = {name: DIALECTS.resolve(name)(service) for name in dialects}

    async def openapi(request: Request) -> Response:
        """This document."""
        return Response(about, media_type="application/json")

    tables["document"] = [
        Endpoint("GET", "/openapi.json", openapi, needs="any", gives=dict[str, Any])
    ]
    about = msgspec.json.encode(document(tables, keyed=gate.keyed))
    routes = [endpoint for table in tables.values() for endpoint in table]
    known = sorted({endpoint.path for endpoint in routes})

    def at(path: str) -> list[Endpoint]:
        return [endpoint for endpoint in routes if endpoint.path_regex.match(path)]

    def needs(scope: Scope) -> Needs:
        """What the route that the router will take needs. That there is none is told to any key,
        and to everybody beside an open route.
        """
        beside_open = False
        for endpoint in routes:
            match, _ = endpoint.matches(scope)
            if match is Match.FULL:
                return endpoint.needs
            beside_open |= match is Match.PARTIAL and endpoint.needs == "open"
        return "open" if beside_open else "any"

    def template(path: str) -> str:
        """The route of a path, or "none": a bounded set, whatever clients ask for."""
        return next((endpoint.path for endpoint in at(path)), "none")

    def refuse(path: str, error: TltError, *, close: bool = False) -> Response:
        if template(path) not in QUIET:  # a probe that is answered with no is no request refused
            service.rejected(error)
        return ErrorResponse(
            error, next((endpoint.error_shape for endpoint in at(path)), error_reply), close=close
        )

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, TltError)
        return refuse(request.url.path, error)

    async def no_such_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405:
            methods = ", ".join(endpoint.method for endpoint in at(path))
            response = refuse(
                path,
                MethodNotAllowed(
                    f"{request.method[:20]} is not a method of {path[:200]}; use {methods}"
                ),
            )
            response.headers["allow"] = methods
            return response
        return refuse(
            path,
            NotFound(
                f"there is no {path[:200]}{nearest(path[:200], known)}; GET /openapi.json lists the routes"
            ),
        )

    async def disconnected(request: Request, error: Exception) -> Response:
        return refuse(
            request.url.path, Cancelled("the client disconnected before its body was complete")
        )

    async def broken(request: Request, error: Exception) -> Response:
        return refuse(request.url.path, unexpected(error))

    config, closing = service.config, partial(refuse, close=True)
    app = FastAPI(
        routes=[*routes],
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(ConnectionLimit, max_connections=config.max_connections, refuse=closing),
            Middleware(Authentication, gate=gate, needs=needs, refuse=closing),
            Middleware(
                BodyLimits,
                max_body_bytes=config.max_body_mb * 2**20,
                body_timeout_s=config.body_timeout_s,
                reading=service.reading,
                refuse=closing,
            ),
            Middleware(Arrival, refuse=closing),
        ],
        exception_handlers={
            TltError: refused,
            HTTPException: no_such_route,
            ClientDisconnect: disconnected,
            Exception: broken,
        },
    )
    return Access(app, service.metrics, template)
