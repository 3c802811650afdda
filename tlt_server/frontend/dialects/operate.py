"""For operators and orchestrators: probes, metrics, and what this server is.

`/livez`: this process works and its engine has not gone, or is back. `/startupz`: the engine has been ready. `/readyz`, `/health`: a
request sent now would be taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.errors import Unavailable
from tlt_server.frontend.auth import caller_of
from tlt_server.frontend.endpoints import Endpoint
from tlt_server.frontend.engine_client import EngineClient
from tlt_server.frontend.generation import Service
from tlt_server.frontend.keys import Caller
from tlt_server.frontend.replies import json_response
from tlt_server.records import EngineInfo, Phase

SECRETS = {"api_key_file", "api_key_variable", "tls_cert", "tls_key", "tls_client_ca"}
PLACES = {"model", "drafter", "weight_root", "state_dir", "host", "port"}


class Status(Struct, frozen=True):
    status: Annotated[Literal["ok"], Meta(description="the answer is yes; a no is an error")] = "ok"


class Startup(Struct, frozen=True):
    started: Annotated[bool, Meta(description="whether the engine has been ready")]
    phases: Annotated[list[Phase], Meta(description="that have ended, in order")]


class ServerInfo(Struct, frozen=True, kw_only=True):
    version: Annotated[str, Meta(description="of the server")]
    served_model_name: Annotated[str, Meta(description="the name to send as `model`")]
    ready: Annotated[bool, Meta(description="whether a request sent now would be taken")]
    numerics: Annotated[str, Meta(description="the guarantee that the tokens have: strict or fast, with how it is kept")]
    engine: Annotated[EngineInfo | None, Meta(description="what the engine says of itself; null until it has been ready")]
    open_sequences: Annotated[int, Meta(description="accepted and not finished")]
    max_queue: Annotated[int, Meta(description="the most of them")]
    config: Annotated[dict[str, Any], Meta(description="every setting by name, but for those of keys and certificates; those that say "
                                                      "where things are, only for a key that may push weights or operate")]


def routes(service: Service) -> list[Endpoint]:
    engine = service.engine
    service.metrics.watch_ready(lambda: _ready(engine))

    async def ready(request: Request) -> Response:
        """Whether a request sent now would be taken."""
        engine.check_available()
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
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(request: Request) -> Response:
        """What this server is: model, engine, limits and settings."""
        return json_response(_server_info(service, caller_of(request)))

    return [
        Endpoint("GET", "/health", ready, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/readyz", ready, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/livez", live, needs="open", gives=Status, raises=(Unavailable,)),
        Endpoint("GET", "/startupz", started, needs="open", gives=Startup, gives_also_at=(503,)),
        Endpoint("GET", "/metrics", metrics, needs="operate"),
        Endpoint("GET", "/server_info", server_info, needs="any", gives=ServerInfo),
    ]


def _server_info(service: Service, caller: Caller) -> ServerInfo:
    info = service.engine.info
    trusted = caller.may("push-weights") or caller.may("operate")
    return ServerInfo(
        version=__version__,
        served_model_name=service.config.served_model_name,
        ready=_ready(service.engine),
        numerics=service.numerics,
        engine=info,
        open_sequences=len(service.engine),
        max_queue=service.config.max_queue,
        config=service.config.model_dump(mode="json", exclude=SECRETS if trusted else SECRETS | PLACES),
    )


def _ready(engine: EngineClient) -> bool:
    try:
        engine.check_available()
    except Unavailable:
        return False
    return True
