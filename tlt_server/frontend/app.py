"""The HTTP application: the dialects' routes, one error shape, and around them authentication and limits."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tlt_server.errors import Cancelled, NotFound, TltError
from tlt_server.frontend.auth import Authentication, Keys
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.generation import Service
from tlt_server.frontend.limits import BodyLimits
from tlt_server.frontend.replies import error_body, error_response, json_response, unexpected


def build_app(service: Service, keys: Keys | None, dialects: Iterable[str] = DIALECTS) -> FastAPI:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, TltError)
        service.rejected(error)
        return error_response(error)

    async def no_such_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(sorted({route.path for route in routes}))
        if error.status_code == 405:
            reply = error_body(NotFound(f"{request.method} is not a method of {request.url.path}"))
            return json_response({"error": reply}, 405)
        return error_response(NotFound(f"there is no {request.url.path[:200]}; known are {known}"))

    async def disconnected(request: Request, error: Exception) -> Response:
        return error_response(Cancelled("the client disconnected before its body was complete"))

    async def broken(request: Request, error: Exception) -> Response:
        return error_response(unexpected(error, request.url.path))

    routes: list[Route] = [route for name in dialects for route in DIALECTS.resolve(name)(service)]
    config = service.config
    return FastAPI(
        routes=[*routes],
        openapi_url=None,
        middleware=[
            Middleware(Authentication, keys=keys, rejected=service.rejected),
            Middleware(BodyLimits, max_body_bytes=config.max_body_mb * 2**20, body_timeout_s=config.body_timeout_s,
                       rejected=service.rejected),
        ],
        exception_handlers={TltError: refused, HTTPException: no_such_route, ClientDisconnect: disconnected, Exception: broken},
    )
