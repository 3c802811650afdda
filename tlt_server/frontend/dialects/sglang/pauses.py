"""Routes that pause, sleep, abort and flush the cache, as trainers that drive SGLang call them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.commands import InFlight, Memory
from tlt_server.errors import Conflict, Forbidden, InvalidRequest, StorageFailed
from tlt_server.frontend.dialects.replies.errors import GONE
from tlt_server.frontend.dialects.sglang.replies import Aborted, Acknowledged
from tlt_server.frontend.dialects.sglang.requests import (
    MemoryFields,
    PauseFields,
    SglangAbort,
    read,
)
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import AnyFields, shown
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service

ROUTES = Routes()
MODES: dict[str, InFlight] = {"abort": "abort", "retract": "recompute", "in_place": "continue"}
ALL: tuple[Memory, ...] = ("weights", "kv_cache")


@ROUTES.post(
    "/pause_generation",
    needs="operate",
    takes=PauseFields,
    optional_body=True,
    gives=Acknowledged,
    raises=GONE,
)
async def pause(service: Service, request: Request) -> Response:
    """Stop generating until POST /continue_generation; new requests wait.

    `abort` ends running sequences with what they have, `retract` gives their KV back and computes
    it again afterwards, and `in_place` keeps it.
    """
    mode = (await read(service, PauseFields, request)).mode
    await service.engine.pauses.pause(MODES[mode], refuse=False, clear_cache=False)
    return json_response(Acknowledged("Generation paused successfully."))


@ROUTES.post(
    "/continue_generation",
    needs="operate",
    takes=AnyFields,
    optional_body=True,
    gives=Acknowledged,
    raises=GONE,
)
async def resume(service: Service, request: Request) -> Response:
    """Continue what was paused, and start what has waited."""
    await read(service, AnyFields, request)
    await service.engine.pauses.resume()
    return json_response(Acknowledged("Generation continued successfully."))


@ROUTES.post(
    "/abort_request",
    needs="data",
    takes=SglangAbort,
    example={"abort_all": True},
    changes=True,
    gives=Aborted,
    raises=(Forbidden, *GONE),
)
async def abort(service: Service, request: Request) -> Response:
    """End a request, or all of them, with what they have.

    Their replies come at once, with finish_reason.type "abort". To end another key's request, or
    all of them, needs the scope operate.
    """
    service.engine.check_running()
    asked = await read(service, SglangAbort, request)
    if not asked.abort_all and not asked.rid:
        raise InvalidRequest(
            f"rid is {shown(asked.rid)} and abort_all is false; name one request by rid, or set "
            "abort_all to end all that is open"
        )
    ended = service.abort(
        [asked.rid] if asked.rid and not asked.abort_all else None, caller_of(request)
    )
    return json_response(Aborted("aborted what was open of it", aborted=ended))


@ROUTES.post(
    "/flush_cache",
    needs="operate",
    takes=AnyFields,
    optional_body=True,
    gives=Acknowledged,
    raises=GONE,
)
@ROUTES.get(
    "/flush_cache",
    needs="operate",
    changes=True,
    gives=Acknowledged,
    raises=(InvalidRequest, *GONE),
)
async def flush(service: Service, request: Request) -> Response:
    """Forget every cached prefix; 400 while sequences run, or are paused with their KV.

    Sequences that only wait have no KV.
    """
    await read(service, AnyFields, request)
    try:
        await service.engine.pauses.clear_cache(unless_held=True)
    except Conflict as busy:
        raise InvalidRequest(busy.message) from None
    return json_response(Acknowledged("Cache flushed."))


@ROUTES.post(
    "/release_memory_occupation",
    needs="operate",
    takes=MemoryFields,
    optional_body=True,
    gives=Acknowledged,
    raises=(Conflict, StorageFailed, *GONE),
)
@ROUTES.get(
    "/release_memory_occupation",
    needs="operate",
    changes=True,
    gives=Acknowledged,
    raises=(Conflict, StorageFailed, *GONE),
)
async def release(service: Service, request: Request) -> Response:
    """Give memory back: KV, weights of target and drafter, or all.

    Running sequences continue with the same tokens afterwards.
    """
    asked = (await read(service, MemoryFields, request)).tags
    await service.sleep(_memory(asked))
    return json_response(Acknowledged("memory released"))


@ROUTES.post(
    "/resume_memory_occupation",
    needs="operate",
    takes=MemoryFields,
    optional_body=True,
    gives=Acknowledged,
    raises=GONE,
)
@ROUTES.get(
    "/resume_memory_occupation", needs="operate", changes=True, gives=Acknowledged, raises=GONE
)
async def take_again(service: Service, request: Request) -> Response:
    """Take memory again, with the same bits in the weights as before."""
    asked = (await read(service, MemoryFields, request)).tags
    await service.engine.pauses.wake(_memory(asked))
    return json_response(Acknowledged("memory resumed"))


def _memory(tags: list[Any]) -> list[Memory]:
    return [memory for memory in ALL if memory in tags or not tags]
