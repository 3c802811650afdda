"""The state of the server, sent once and again after each change, for clients that wait for one.

An event holds the newest state, not a history: a slow reader misses the states in between, and
nothing piles up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response, StreamingResponse

from tlt_server.errors import Unavailable
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.service import Service

MAX_WAIT_S = 86400.0
WaitForChanges = Annotated[
    float,
    "the longest time to wait for changes; 0: only the current state",
    Meta(ge=0, le=MAX_WAIT_S),
]

State = TypeVar("State")


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


ROUTES = Routes()


@ROUTES.get("/events", needs="any", text="text/event-stream", streams=(("state", ServerState),))
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
    """Yield what `look` returns, at once and after each change that is told, for `wait_s`
    seconds.
    """
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
