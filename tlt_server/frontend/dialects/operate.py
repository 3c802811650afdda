"""Routes for operators and orchestrators: probes, metrics and server info.

`/livez`: this process works, and its engine runs, starts or will be restarted, so killing the
server would only lose what can resume. `/startupz`: the engine has been ready. `/readyz`: a request
sent now would be taken. `/health`: it would, or only a pause or a sleep that a client asked for
prevents it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.frontend.dialects.replies.server_info import ServerInfo, server_info
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import Status, json_response
from tlt_server.frontend.link.starting import UnderWay
from tlt_server.frontend.service import Service
from tlt_server.wire.events import Phase


class Startup(Struct, frozen=True):
    """The progress of the engine's start."""

    started: Annotated[bool, "whether the engine has been ready"]
    phases: Annotated[list[Phase], "phases that have ended, in order"]
    under_way: Annotated[UnderWay | None, "the phase of a start, or of a restart, that runs now"]


ROUTES = Routes()


@ROUTES.get("/health", needs="open")
async def healthy(service: Service) -> Status:
    """Check that only a pause or a sleep that a client asked for may keep requests out."""
    service.engine.check_serving()
    return Status()


@ROUTES.get("/readyz", needs="open")
async def ready(service: Service) -> Status:
    """Check that a request sent now would be taken."""
    service.engine.check_available()
    return Status()


@ROUTES.get("/livez", needs="open")
async def live(service: Service) -> Status:
    """Check that this process works and its engine has not gone for good."""
    service.engine.check_alive()
    return Status()


@ROUTES.get("/startupz", needs="open", gives_also_at=(503,))
async def started(service: Service) -> Annotated[Response, Startup]:
    """Show how long each start-up phase took, and which one is under way; the status is 503 until
    the engine is ready.
    """
    start = service.engine.start
    state = Startup(service.engine.info is not None, start.phases, start.under_way)
    return json_response(state, 200 if state.started else 503)


@ROUTES.get("/metrics", needs="operate", engine_fails=False)
async def metrics(service: Service, request: Request) -> Response:
    """Return the metrics of this server for Prometheus, as OpenMetrics where `Accept` says so."""
    shown = service.metrics.exposition(request.headers.get("accept", ""))
    return Response(shown.text, media_type=shown.media_type)


@ROUTES.get("/server_info", needs="any")
async def info(
    service: Service,
    caller: Caller,
    config_format: Annotated[str, "accepted and without effect: the reply is JSON"] = "",
) -> ServerInfo:
    """Describe this server: model, engine, limits and settings."""
    return server_info(service, caller)
