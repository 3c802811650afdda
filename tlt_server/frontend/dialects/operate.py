"""For operators and orchestrators: probes, metrics, and what this server is.

`/livez`: this process works and its engine has not gone, or is back. `/startupz`: the engine has
been ready. `/readyz`: a request sent now would be taken. `/health`: it would, or a pause or a sleep
that was asked for is all that stands against it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import Unavailable
from tlt_server.frontend.dialects.server_info import ServerInfo, is_ready, server_info
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Endpoint, Parameter
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.records import Phase


class Status(Struct, frozen=True):
    status: Annotated[Literal["ok"], Meta(description="the answer is yes; a no is an error")] = "ok"


class Startup(Struct, frozen=True):
    started: Annotated[bool, Meta(description="whether the engine has been ready")]
    phases: Annotated[list[Phase], Meta(description="that have ended, in order")]


def routes(service: Service) -> list[Endpoint]:
    engine = service.engine
    service.metrics.watch_ready(lambda: is_ready(service))

    async def ready(request: Request) -> Response:
        """Whether a request sent now would be taken."""
        engine.check_available()
        return json_response(Status())

    async def healthy(request: Request) -> Response:
        """Whether requests are taken, but for a pause or a sleep that somebody asked for."""
        engine.check_serving()
        return json_response(Status())

    async def live(request: Request) -> Response:
        """Whether this process works and its engine has not gone."""
        engine.check_alive()
        return json_response(Status())

    async def started(request: Request) -> Response:
        """Whether the engine has been ready, and how long each start-up phase took; 503 until then."""
        state = Startup(engine.info is not None, engine.phases)
        return json_response(state, 200 if state.started else 503)

    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        return Response(
            service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def info(request: Request) -> Response:
        """What this server is: model, engine, limits and settings."""
        return json_response(server_info(service, caller_of(request)))

    form = Parameter(
        "config_format",
        "query",
        "accepted and without effect: the reply is JSON",
        {"type": "string"},
    )
    return [
        Endpoint("GET", "/health", healthy, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/readyz", ready, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/livez", live, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/startupz", started, needs="open", gives=Startup, gives_also_at=(503,)),
        Endpoint("GET", "/metrics", metrics, needs="operate"),
        Endpoint("GET", "/server_info", info, needs="any", parameters=(form,), gives=ServerInfo),
    ]
