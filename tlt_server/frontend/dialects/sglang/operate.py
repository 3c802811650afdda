"""Routes that pause, sleep, abort, flush the cache and describe this server, as clients of SGLang
and trainers that drive it call them.

GET /server_info, which several dialects share, is in `dialects.operate`.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.errors import Conflict, InvalidRequest, StorageFailed, Unavailable
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, failure_naming
from tlt_server.frontend.dialects.replies.server_info import ServerInfo, server_info
from tlt_server.frontend.dialects.sglang.requests import read
from tlt_server.frontend.generation.delivery import reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem
from tlt_server.frontend.generation.requests import ItemFields, NativeRequest, SamplingFields
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes, while_running
from tlt_server.frontend.http.fields import AnyFields, Tolerant, shown
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import Status, json_response
from tlt_server.frontend.reading.asking import unless
from tlt_server.frontend.service import Service
from tlt_server.wire.commands import InFlight, Memory
from tlt_server.wire.labels import label_of
from tlt_server.wire.packed import PackedIds

ROUTES = Routes(read=read, empty=AnyFields)
MAX_TAGS = 16
MODES: dict[str, InFlight] = {"abort": "abort", "retract": "recompute", "in_place": "continue"}
ALL: tuple[Memory, ...] = ("weights", "kv_cache")


class PauseFields(Tolerant, frozen=True, kw_only=True):
    mode: Annotated[
        Literal["abort", "retract", "in_place"], "what becomes of running sequences"
    ] = "abort"


class SglangAbort(Tolerant, frozen=True, kw_only=True):
    rid: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        "the name that the request was given; empty: none",
    ] = None
    abort_all: Annotated[bool, "end everything that is open"] = False


class MemoryFields(Tolerant, frozen=True, kw_only=True):
    tags: Annotated[
        list[Literal["weights", "kv_cache", "cuda_graph"]],
        "empty: all; cuda_graph is without effect, as graphs come and go with the rest",
        Meta(max_length=MAX_TAGS),
    ] = []


class Acknowledged(Struct, frozen=True):
    """The answer to a successful call."""

    message: Annotated[str, "the change that was made"]
    status: Annotated[Literal["ok"], "always the same"] = "ok"


class Aborted(Acknowledged, frozen=True, kw_only=True):
    """The answer to an abort."""

    aborted: Annotated[int, "sequences that this ends"]


class ModelInfo(Struct, frozen=True, kw_only=True):
    model_path: Annotated[str, "the directory of the model"]
    tokenizer_path: Annotated[str, "the same"]
    is_generation: Annotated[bool, "always true"] = True
    weight_version: Annotated[str, "the target's version that is live"]
    served_model_name: Annotated[str, "the name of the served model"]


class VersionReply(Struct, frozen=True):
    weight_version: Annotated[str, "the target's version that is live"]


class Loads(Struct, frozen=True, kw_only=True):
    """The load of one replica."""

    dp_rank: Annotated[int, "always 0"] = 0
    num_running_reqs: Annotated[int, "sequences that decode"]
    num_waiting_reqs: Annotated[int, "sequences that wait"]
    num_total_reqs: Annotated[int, "sequences accepted and not ended"]
    num_used_tokens: Annotated[int, "positions of KV pages in use"]
    max_total_num_tokens: Annotated[int, "positions of all KV pages"]
    max_running_requests: Annotated[int, "sequences that decode at once"]
    token_usage: Annotated[float, "the fraction of the positions in use"]


class LoadsReply(Struct, frozen=True, kw_only=True):
    timestamp: Annotated[float, "Unix seconds"]
    version: Annotated[str, "version of the server"]
    dp_rank_count: Annotated[int, "always 1"] = 1
    loads: Annotated[list[Loads], "load of the one replica"]


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
    "/abort_request",
    needs="data",
    read=while_running(read),
    optional_body=False,
    example={"abort_all": True},
    changes=True,
)
async def abort(service: Service, asked: SglangAbort, caller: Caller) -> Aborted:
    """End a request, or all of them, with what they have.

    Their replies come at once, with finish_reason.type "abort". To end another key's request, or
    all of them, needs the scope operate.
    """
    if not asked.abort_all and not asked.rid:
        raise InvalidRequest(
            f"rid is {shown(asked.rid)} and abort_all is false; name one request by rid, or set "
            "abort_all to end all that is open"
        )
    ended = service.abort([asked.rid] if asked.rid and not asked.abort_all else None, caller)
    return Aborted("aborted what was open of it", aborted=ended)


@ROUTES.post("/finish_session", needs="data")
async def finish_session(service: Service) -> Acknowledged:
    """Accept the end of a session. Nothing is held for one, so nothing changes."""
    return Acknowledged("Session finished.")


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


@ROUTES.get("/get_server_info", needs="any")
async def about(service: Service, caller: Caller) -> ServerInfo:
    """Describe this server, as GET /server_info does."""
    return server_info(service, caller)


@ROUTES.get("/health_generate", needs="data", raises=UNFINISHED)
async def health_generate(service: Service, request: Request) -> Annotated[Response, Status]:
    """Check that a token can be made, by making one.

    The status is 503 while generation is paused or asleep, also if that starts meanwhile.
    """
    service.engine.check_available()
    service.engine.pauses.check_generating()
    one = NativeRequest(
        requests=[ItemFields(token_ids=PackedIds.of([0]), seed=0, sd=False, train=False)],
        sampling=SamplingFields(max_tokens=1, ignore_eos=True),
    )
    _, generation = await service.begin(one, caller_of(request))
    return await reply(
        request, unless(service.engine.pauses.until_halted(), _made(generation)), generation
    )


async def _made(generation: Generation) -> Response:
    async for event in generation.successes():
        if isinstance(event, FinishedItem) and event.choices[0].token_ids:
            return json_response(Status())
    raise Unavailable("the token was aborted before it was made; ask again", retry_after_s=1)


@ROUTES.get("/model_info", needs="any")
@ROUTES.get("/get_model_info", needs="any")
async def model_info(service: Service, caller: Caller) -> ModelInfo:
    """Name the served model and the version of its weights."""
    model = server_info(service, caller).model_path
    return ModelInfo(
        model_path=model,
        tokenizer_path=model,
        weight_version=label_of(service.running().weight_version),
        served_model_name=service.config.served_model_name,
    )


@ROUTES.get("/get_weight_version", needs="any")
async def weight_version(service: Service) -> VersionReply:
    """Name the version of the target that is live."""
    return VersionReply(label_of(service.running().weight_version))


@ROUTES.get("/v1/loads", needs="any", error_shape=failure_naming(()))
async def loads(
    service: Service,
    include: Annotated[str, "accepted and without effect: the reply is small"] = "",
) -> LoadsReply:
    """Count the sequences that are open, run and wait, and the KV positions in use."""
    own, gauges = service.running(), service.engine.replica.gauges
    positions = own.pages * own.page_size
    used = positions - round(gauges.get("pages_free", own.pages)) * own.page_size
    one = Loads(
        num_running_reqs=round(gauges.get("running", 0)),
        num_waiting_reqs=round(gauges.get("waiting", 0)),
        num_total_reqs=len(service.engine),
        num_used_tokens=used,
        max_total_num_tokens=positions,
        max_running_requests=own.max_running,
        token_usage=used / positions,
    )
    return LoadsReply(timestamp=time.time(), version=__version__, loads=[one])
