"""Routes for operators and orchestrators: probes, metrics, server info and events, and those that
stop and resume the engine: pause, sleep, abort, and clear the cache.

`/livez`: this process works, and its engine runs, starts or will be restarted, so killing the
server would only lose work that can resume. `/startupz`: the engine has been ready. `/readyz`: a
request sent now would be accepted. `/health`: likewise, but a client's pause or sleep does not
count. `/events` sends the state of the server once and again after each change; a slow reader
misses the states in between, and nothing piles up.

`in_flight` decides what happens to accepted sequences, as it does for weight pushes. The borrowed
dialects translate to the same `PauseState`; gRPC and the clients call these routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tlt_client.fields import ShortName
from tlt_client.wire import AbortReply, EngineState
from tlt_server.errors import Conflict, InvalidRequest, StorageFailed, Unavailable
from tlt_server.frontend.dialects.replies.server_info import ServerInfo, server_info
from tlt_server.frontend.generation.requests import NAMES
from tlt_server.frontend.http.endpoints import Routes, read_json, while_running
from tlt_server.frontend.http.fields import Strict, check_one
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import Status, json_response
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.link.starting import UnderWay
from tlt_server.frontend.service import Service
from tlt_server.wire.commands import InFlight, Memory
from tlt_server.wire.events import Phase

ROUTES = Routes()
MAX_WAIT_S = 86400.0
ALL_MEMORY: tuple[Memory, ...] = ("weights", "kv_cache")
MAX_MEMORY = 16  # names in one call
WaitForChanges = Annotated[
    float,
    "the longest time to wait for changes; 0: only the current state",
    Meta(ge=0, le=MAX_WAIT_S),
]
State = TypeVar("State")
EVENTS, ENGINE = Routes(), Routes()


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
    service.engine.replica.check_alive()
    return Status()


@ROUTES.get("/startupz", needs="open", gives_also_at=(503,))
async def started(service: Service) -> Annotated[Response, Startup]:
    """Show how long each start-up phase took, and which one is under way; the status is 503 until
    the engine is ready.
    """
    start = service.engine.replica.start
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


class NativePause(Strict, frozen=True, kw_only=True):
    in_flight: Annotated[
        InFlight,
        "accepted sequences: continue keeps them and their KV; recompute gives their KV back and "
        "computes it again after POST /engine/resume; abort ends them with what they have; drain "
        "lets them end first",
    ] = "continue"
    new_requests: Annotated[
        Literal["wait", "refuse"], "requests that come meanwhile: wait, or get a 503"
    ] = "wait"
    clear_cache: Annotated[bool, "forget cached prefixes too"] = False


class NativeSleep(Strict, frozen=True, kw_only=True):
    memory: Annotated[
        list[Memory],
        "what to give back: weights of target and drafter, KV; empty: both",
        Meta(max_length=MAX_MEMORY),
    ] = []
    in_flight: Annotated[
        Literal["recompute", "abort", "drain"],
        "accepted sequences: recompute continues with the same tokens once all is awake; abort "
        "ends them with what they have; drain lets them end first",
    ] = "recompute"


class NativeWake(Strict, frozen=True, kw_only=True):
    memory: Annotated[
        list[Memory], "what to take again; empty: both", Meta(max_length=MAX_MEMORY)
    ] = []


class NativeClear(Strict, frozen=True, kw_only=True):
    unless_held: Annotated[bool, "409 instead while a sequence runs or is paused with its KV"] = (
        False
    )


class NativeAbort(Strict, frozen=True, kw_only=True):
    """Items by their ids, or all of them."""

    exactly_one: ClassVar[tuple[str, ...]] = ("ids", "all")

    ids: Annotated[
        Annotated[list[ShortName], Meta(min_length=1, extra={"limit": NAMES})] | None,
        "ids that items of POST /generate, or other requests, were given",
    ] = None
    all: Annotated[bool | None, "true: everything that is open, which needs the scope operate"] = (
        None
    )


@ENGINE.post("/engine/pause", needs="operate", raises=(Conflict,))
async def pause(service: Service, asked: NativePause) -> EngineState:
    """Stop generating until POST /engine/resume.

    Answers once the pause holds; with `drain`, once every accepted sequence has ended.
    """
    await service.engine.pauses.pause(
        asked.in_flight, refuse=asked.new_requests == "refuse", clear_cache=asked.clear_cache
    )
    return _engine_state(service)


@ENGINE.post("/engine/resume", needs="operate")
async def resume(service: Service) -> EngineState:
    """Go on with what was paused or has waited, and take new requests."""
    await service.engine.pauses.resume()
    return _engine_state(service)


@ENGINE.post("/engine/sleep", needs="operate", raises=(Conflict, StorageFailed))
async def sleep(service: Service, asked: NativeSleep) -> EngineState:
    """Give memory back until POST /engine/wake; new requests get a 503 until all is awake.

    The KV is given back in any case, as nothing can compute it without weights. Weights come
    back bit for bit. With the weights the trainer process gives its memory back: 503 where it has
    not in time, though the engine sleeps.
    """
    await service.sleep(asked.memory or ALL_MEMORY, asked.in_flight)
    return _engine_state(service)


@ENGINE.post("/engine/wake", needs="operate")
async def wake(service: Service, asked: NativeWake) -> EngineState:
    """Take memory again; generation goes on once all is awake and no pause holds."""
    await service.engine.pauses.wake(asked.memory or ALL_MEMORY)
    return _engine_state(service)


@ENGINE.post("/engine/clear_cache", needs="operate", raises=(Conflict,))
async def clear_cache(service: Service, asked: NativeClear) -> EngineState:
    """Forget every cached prefix. Running sequences keep their own KV, which serves no other
    request from then on.
    """
    await service.engine.pauses.clear_cache(unless_held=asked.unless_held)
    return _engine_state(service)


@ENGINE.post(
    "/engine/abort",
    needs="data",
    read=while_running(read_json),
    example={"ids": ["question-7"]},
    changes=True,
)
async def abort(service: Service, asked: NativeAbort, caller: Caller) -> AbortReply:
    """End items with what they have; their replies say finish_reason "abort".

    An id that is not open has ended already. Another key's items, and all of them, need the
    scope operate.
    """
    if asked.all is False:
        raise InvalidRequest("all is False; it must be True: leave it out to name ids")
    check_one(asked)
    return AbortReply(service.abort(asked.ids, caller))


def _engine_state(service: Service) -> EngineState:
    pauses = service.engine.pauses
    refuses, paused = pauses.refusing or bool(pauses.asleep), pauses.paused
    return EngineState(
        paused=paused,
        new_requests="refuse" if refuses else "wait" if paused else "run",
        asleep=sorted(pauses.asleep),
    )
