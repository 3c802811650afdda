"""Routes that pause, sleep, abort and flush the cache, as trainers that drive SGLang call them."""

from __future__ import annotations

from typing import Any

from tlt_server.errors import Conflict, InvalidRequest, StorageFailed
from tlt_server.frontend.dialects.sglang.replies import Aborted, Acknowledged
from tlt_server.frontend.dialects.sglang.requests import (
    MemoryFields,
    PauseFields,
    SglangAbort,
    read,
)
from tlt_server.frontend.http.endpoints import Routes, Unread
from tlt_server.frontend.http.fields import AnyFields, shown
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.service import Service
from tlt_server.wire.commands import InFlight, Memory

ROUTES = Routes(read=read, empty=AnyFields)
MODES: dict[str, InFlight] = {"abort": "abort", "retract": "recompute", "in_place": "continue"}
ALL: tuple[Memory, ...] = ("weights", "kv_cache")


@ROUTES.post("/pause_generation", needs="operate")
async def pause(service: Service, asked: PauseFields) -> Acknowledged:
    """Stop generating until POST /continue_generation; new requests wait.

    `abort` ends running sequences with what they have, `retract` gives their KV back and computes
    it again afterwards, and `in_place` keeps it.
    """
    await service.engine.pauses.pause(MODES[asked.mode], refuse=False, clear_cache=False)
    return Acknowledged("Generation paused successfully.")


@ROUTES.post("/continue_generation", needs="operate")
async def resume(service: Service) -> Acknowledged:
    """Continue what was paused, and start what has waited."""
    await service.engine.pauses.resume()
    return Acknowledged("Generation continued successfully.")


@ROUTES.post(
    "/abort_request", needs="data", optional_body=False, example={"abort_all": True}, changes=True
)
async def abort(service: Service, body: Unread[SglangAbort], caller: Caller) -> Aborted:
    """End a request, or all of them, with what they have.

    Their replies come at once, with finish_reason.type "abort". To end another key's request, or
    all of them, needs the scope operate.
    """
    service.engine.check_running()
    asked = await body.read()
    if not asked.abort_all and not asked.rid:
        raise InvalidRequest(
            f"rid is {shown(asked.rid)} and abort_all is false; name one request by rid, or set "
            "abort_all to end all that is open"
        )
    ended = service.abort([asked.rid] if asked.rid and not asked.abort_all else None, caller)
    return Aborted("aborted what was open of it", aborted=ended)


@ROUTES.post("/flush_cache", needs="operate")
@ROUTES.get("/flush_cache", needs="operate", changes=True, raises=(InvalidRequest,))
async def flush(service: Service) -> Acknowledged:
    """Forget every cached prefix; 400 while sequences run, or are paused with their KV.

    Sequences that only wait have no KV.
    """
    try:
        await service.engine.pauses.clear_cache(unless_held=True)
    except Conflict as busy:
        raise InvalidRequest(busy.message) from None
    return Acknowledged("Cache flushed.")


@ROUTES.post("/release_memory_occupation", needs="operate", raises=(Conflict, StorageFailed))
@ROUTES.get(
    "/release_memory_occupation", needs="operate", changes=True, raises=(Conflict, StorageFailed)
)
async def release(service: Service, asked: MemoryFields) -> Acknowledged:
    """Give memory back: KV, weights of target and drafter, or all.

    Running sequences continue with the same tokens afterwards.
    """
    await service.sleep(_memory(asked.tags))
    return Acknowledged("memory released")


@ROUTES.post("/resume_memory_occupation", needs="operate")
@ROUTES.get("/resume_memory_occupation", needs="operate", changes=True)
async def take_again(service: Service, asked: MemoryFields) -> Acknowledged:
    """Take memory again, with the same bits in the weights as before."""
    await service.engine.pauses.wake(_memory(asked.tags))
    return Acknowledged("memory resumed")


def _memory(tags: list[Any]) -> list[Memory]:
    return [memory for memory in ALL if memory in tags or not tags]
