"""The native routes that pause and resume the engine: pause, sleep, abort, and clear the cache.

The terms are the engine's own: `in_flight` decides what happens to accepted sequences, as it does
for weight pushes. The borrowed dialects translate to the same `PauseState`; gRPC and the clients
call these routes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from tlt_client.fields import ShortName
from tlt_client.wire import AbortReply, EngineState
from tlt_server.errors import Conflict, InvalidRequest, StorageFailed
from tlt_server.frontend.generation.requests import NAMES
from tlt_server.frontend.http.endpoints import Routes, read_json, while_running
from tlt_server.frontend.http.fields import Strict, check_one
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.service import Service
from tlt_server.wire.commands import InFlight, Memory

MAX_MEMORY = 16  # names in one call
ALL_MEMORY: tuple[Memory, ...] = ("weights", "kv_cache")


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


ROUTES = Routes()


@ROUTES.post("/engine/pause", needs="operate", raises=(Conflict,))
async def pause(service: Service, asked: NativePause) -> EngineState:
    """Stop generating until POST /engine/resume.

    Answers once the pause holds; with `drain`, once every accepted sequence has ended.
    """
    await service.engine.pauses.pause(
        asked.in_flight, refuse=asked.new_requests == "refuse", clear_cache=asked.clear_cache
    )
    return _state(service)


@ROUTES.post("/engine/resume", needs="operate")
async def resume(service: Service) -> EngineState:
    """Go on with what was paused or has waited, and take new requests."""
    await service.engine.pauses.resume()
    return _state(service)


@ROUTES.post("/engine/sleep", needs="operate", raises=(Conflict, StorageFailed))
async def sleep(service: Service, asked: NativeSleep) -> EngineState:
    """Give memory back until POST /engine/wake; new requests get a 503 until all is awake.

    The KV is given back in any case, as nothing can compute it without weights. Weights come
    back bit for bit. With the weights the trainer process gives its memory back: 503 where it has
    not in time, though the engine sleeps.
    """
    await service.sleep(asked.memory or ALL_MEMORY, asked.in_flight)
    return _state(service)


@ROUTES.post("/engine/wake", needs="operate")
async def wake(service: Service, asked: NativeWake) -> EngineState:
    """Take memory again; generation goes on once all is awake and no pause holds."""
    await service.engine.pauses.wake(asked.memory or ALL_MEMORY)
    return _state(service)


@ROUTES.post("/engine/clear_cache", needs="operate", raises=(Conflict,))
async def clear_cache(service: Service, asked: NativeClear) -> EngineState:
    """Forget every cached prefix. Running sequences keep their own KV, which serves no other
    request from then on.
    """
    await service.engine.pauses.clear_cache(unless_held=asked.unless_held)
    return _state(service)


@ROUTES.post(
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


def _state(service: Service) -> EngineState:
    pauses = service.engine.pauses
    refuses, paused = pauses.refusing or bool(pauses.asleep), pauses.paused
    return EngineState(
        paused=paused,
        new_requests="refuse" if refuses else "wait" if paused else "run",
        asleep=sorted(pauses.asleep),
    )
