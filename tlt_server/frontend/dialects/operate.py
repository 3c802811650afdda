"""For operators and orchestrators: probes, metrics, and what this server is.

`/livez`: this process works and its engine has not gone. `/startupz`: the engine has been ready. `/readyz`, `/health`: a request
sent now would be taken.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tlt_server import __version__
from tlt_server.errors import Unavailable
from tlt_server.frontend.generation import Service
from tlt_server.frontend.replies import json_response


def routes(service: Service) -> list[Route]:
    engine = service.engine

    async def ready(request: Request) -> Response:
        engine.check_available()
        return json_response({"status": "ok"})

    async def live(request: Request) -> Response:
        if engine.failure is not None:
            raise Unavailable(f"the engine is gone: {engine.failure.message}")
        return json_response({"status": "ok"})

    async def started(request: Request) -> Response:
        phases = [{"name": phase.name, "seconds": phase.seconds, "detail": phase.detail} for phase in engine.phases]
        return json_response({"started": engine.info is not None, "phases": phases}, 200 if engine.info is not None else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(request: Request) -> Response:
        return json_response(_server_info(service))

    return [
        Route("/health", ready), Route("/readyz", ready), Route("/livez", live), Route("/startupz", started),
        Route("/metrics", metrics), Route("/server_info", server_info),
    ]


def _server_info(service: Service) -> dict[str, Any]:
    info = service.engine.info
    return {
        "version": __version__,
        "served_model_name": service.config.served_model_name,
        "ready": info is not None and service.engine.failure is None and not service.engine.draining,
        "numerics": service.numerics,
        "engine": info,
        "open_sequences": len(service.engine),
        "max_queue": service.config.max_queue,
        "config": service.config.model_dump(mode="json", exclude={"api_key_file"}),
    }
