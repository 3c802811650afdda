"""Routes for operators and orchestrators: probes, metrics, server info, and events.

`/livez`: this process works, and its engine runs, starts or will be restarted, so killing the
server would only lose work that can resume. `/startupz`: the engine has been ready. `/readyz`: a
request sent now would be accepted. `/health`: likewise, but a client's pause or sleep does not
count. `/events` sends the state of the server once and again after each change; a slow reader
misses the states in between, and nothing piles up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tlt_server.errors import Unavailable
from tlt_server.frontend.dialects.replies.server_info import ServerInfo, server_info
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import Status, json_response
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.link.starting import UnderWay
from tlt_server.frontend.service import Service
from tlt_server.wire.events import Phase

ROUTES = Routes()
MAX_WAIT_S = 86400.0
WaitForChanges = Annotated[
    float,
    "the longest time to wait for changes; 0: only the current state",
    Meta(ge=0, le=MAX_WAIT_S),
]
State = TypeVar("State")
EVENTS = Routes()


class Startup(Struct, frozen=True):
    """The progress of the engine's start."""

    started: Annotated[bool, "whether the engine has been ready"]
    phases: Annotated[list[Phase], "phases that have ended, in order"]
    under_way: Annotated[UnderWay | None, "the phase of a start, or of a restart, that runs now"]


@ROUTES.get("/health", needs="open")
async def healthy(service: Service) -> Status:
    """Check that requests are accepted, or that only a client's pause or sleep prevents it."""
    service.engine.check_serving()
    return Status()


@ROUTES.get("/readyz", needs="open")
async def ready(service: Service) -> Status:
    """Check that a request sent now would be accepted."""
    service.engine.check_available()
    return Status()


@ROUTES.get("/livez", needs="open")
async def live(service: Service) -> Status:
    """Check that this process works and its engine has not stopped for good."""
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


class ServerState(Struct, frozen=True):
    """The facts that decide whether and how requests are served."""

    ready: Annotated[bool, "whether a request sent now would be taken"]
    reason: Annotated[str, "why not; else empty"]
    draining: Annotated[bool, "whether the server is about to stop; this state is the last"]
    paused: Annotated[bool, "whether a pause holds"]
    asleep: Annotated[list[str], "memory that is given back: weights, kv_cache"]
    weight_version: Annotated[
        str, "the target's version that is live; empty until the engine has been ready"
    ]
    drafter_version: Annotated[str, "the drafter's; empty where none can be pushed"]
    engine_pid: Annotated[
        int, "the engine's process, another one after a restart; 0 until the engine has been ready"
    ]


@EVENTS.get("/events", needs="any", text="text/event-stream", streams=(("state", ServerState),))
async def events(service: Service, wait_s: WaitForChanges = 0) -> Response:
    """Send the server's state as the server-sent event `state`.

    With `?wait_s=`, at most a day, it is sent again after each change.
    """

    async def frames() -> AsyncIterator[bytes]:
        async for state in changes(lambda: server_state(service), service.engine.changes, wait_s):
            yield b"event: state\ndata: " + msgspec.json.encode(state) + b"\n\n"
            if state.draining:
                return

    return StreamingResponse(
        frames(), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


def server_state(service: Service) -> ServerState:
    engine = service.engine
    try:
        engine.check_available()
        reason = ""
    except Unavailable as error:
        reason = error.message
    info = engine.info
    return ServerState(
        not reason,
        reason,
        engine.draining,
        engine.pauses.paused,
        sorted(engine.pauses.asleep),
        info.weight_version if info else "",
        info.drafter_version if info else "",
        info.pid if info else 0,
    )


async def changes(look: Callable[[], State], told: Changes, wait_s: float) -> AsyncIterator[State]:
    """Yield the result of `look`, at once and after each change, for `wait_s` seconds."""
    end_s = asyncio.get_running_loop().time() + wait_s if wait_s < math.inf else None
    change, state = told.next, look()
    yield state
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout_at(end_s):
                await change.wait()
            before, change, state = state, told.next, look()
            if state != before:
                yield state
