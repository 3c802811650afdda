"""Routes that describe this server, as clients of vLLM ask for it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.errors import Unavailable
from tlt_server.frontend.dialects.replies.status import Status
from tlt_server.frontend.dialects.vllm_rl.replies import Load, ServerVersion, fault
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service

ROUTES = Routes(error_shape=fault)


@ROUTES.get("/load", needs="any", gives=Load)
async def load(service: Service, request: Request) -> Response:
    """Count the sequences that are open."""
    return json_response(Load(len(service.engine)))


@ROUTES.get("/version", needs="any", gives=ServerVersion)
async def version(service: Service, request: Request) -> Response:
    """Return the version of the server."""
    return json_response(ServerVersion(__version__))


@ROUTES.get("/ping", needs="open", gives=Status, raises=(Unavailable,))
async def ping(service: Service, request: Request) -> Response:
    """Check that this process works and its engine has not gone for good."""
    service.engine.check_alive()
    return json_response(Status())
