"""Routes that describe this server, as clients of vLLM ask for it."""

from __future__ import annotations

from tlt_server import __version__
from tlt_server.frontend.dialects.replies.status import Status
from tlt_server.frontend.dialects.vllm_rl.replies import Load, ServerVersion, fault
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.service import Service

ROUTES = Routes(error_shape=fault)


@ROUTES.get("/load", needs="any")
async def load(service: Service) -> Load:
    """Count the sequences that are open."""
    return Load(len(service.engine))


@ROUTES.get("/version", needs="any")
async def version(service: Service) -> ServerVersion:
    """Return the version of the server."""
    return ServerVersion(__version__)


@ROUTES.get("/ping", needs="open")
async def ping(service: Service) -> Status:
    """Check that this process works and its engine has not gone for good."""
    service.engine.check_alive()
    return Status()
