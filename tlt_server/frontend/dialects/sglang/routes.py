"""The dialect `sglang`: what trainers that drive SGLang call to pause, flush, sleep, abort, look
and push weights.

It only translates: pauses and sleep are `halt`, weight updates `weight_session`. POST /generate,
which it shares with the native dialect, stands in `native`, GET /server_info in `operate`, POST
/update_weight_version in `vllm_rl`.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    Poisoned,
    PushFailed,
    QueueFull,
    QueueTimeout,
    StorageFailed,
    Unavailable,
    UnsafeChannel,
    WeightsRefused,
)
from tlt_server.frontend.dialects.operate import Status
from tlt_server.frontend.dialects.server_info import ServerInfo, server_info
from tlt_server.frontend.dialects.sglang.replies import (
    Acknowledged,
    Loads,
    LoadsReply,
    ModelInfo,
    Outcome,
    Rows,
    VersionReply,
    outcome_of,
    rows_of,
)
from tlt_server.frontend.dialects.sglang.requests import (
    GROUP,
    AbortFields,
    BeginFields,
    DiskFields,
    DistributedFields,
    GroupFields,
    LeaveFields,
    MemoryFields,
    NoFields,
    PauseFields,
    ReadFields,
    TensorFields,
)
from tlt_server.frontend.generation.delivery import reply, unless
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem
from tlt_server.frontend.generation.requests import ItemFields, NativeRequest, SamplingFields
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.endpoints import Endpoint, Parameter
from tlt_server.frontend.http.fields import Model, checked, without_nulls
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.broadcasts import described
from tlt_server.frontend.weights.checker import CheckFields
from tlt_server.records import EngineInfo, InFlight, Manifest, Memory, ReadWeights

MODES: dict[str, InFlight] = {"abort": "abort", "retract": "recompute", "in_place": "continue"}
ALL: tuple[Memory, ...] = ("weights", "kv_cache")
NUMBER = re.compile("-?[0-9]{1,18}")  # in a query


def routes(service: Service) -> list[Endpoint]:
    engine, halt, session = service.engine, service.engine.pauses, service.session

    def info() -> EngineInfo:
        engine.check_running()
        assert engine.info is not None
        return engine.info

    async def about(request: Request) -> Response:
        """What this server is, as GET /server_info says it."""
        return json_response(server_info(service, caller_of(request)))

    async def health_generate(request: Request) -> Response:
        """Whether a token can be made: one is. 503 while generation is paused or asleep, also when
        that begins meanwhile.
        """
        engine.check_available()
        halt.check_generating()
        one = NativeRequest(
            requests=[checked(ItemFields, {"token_ids": [0], "seed": 0, "sd": False})],
            sampling=checked(SamplingFields, {"max_tokens": 1, "ignore_eos": True}),
        )
        generation = service.start(
            await service.validator.batch(one, info()), caller_of(request).name
        )
        return await reply(request, unless(halt.until_halted(), _made(generation)), generation)

    async def _made(generation: Generation) -> Response:
        async for event in generation.events():
            if isinstance(event, FailedItem):
                raise event.error
            if isinstance(event, FinishedItem) and event.choices[0].token_ids:
                return json_response(Status())
        raise Unavailable("the token was aborted before it was made; ask again", retry_after_s=1)

    async def model_info(request: Request) -> Response:
        """The served model and the version of its weights."""
        model = server_info(service, caller_of(request)).model_path
        return json_response(
            ModelInfo(
                model_path=model,
                tokenizer_path=model,
                weight_version=info().weight_version,
                served_model_name=service.config.served_model_name,
            )
        )

    async def weight_version(request: Request) -> Response:
        """The target's version that is live."""
        return json_response(VersionReply(info().weight_version))

    async def loads(request: Request) -> Response:
        """How much is open, runs and waits, and how much KV it uses."""
        own, gauges = info(), engine.gauges
        positions = own.pages * own.page_size
        used = positions - round(gauges.get("pages_free", own.pages)) * own.page_size
        one = Loads(
            num_running_reqs=round(gauges.get("running", 0)),
            num_waiting_reqs=round(gauges.get("waiting", 0)),
            num_total_reqs=len(engine),
            num_used_tokens=used,
            max_total_num_tokens=positions,
            max_running_requests=own.max_running,
            token_usage=used / positions,
        )
        return json_response(LoadsReply(timestamp=time.time(), version=__version__, loads=[one]))

    async def pause(request: Request) -> Response:
        """Stop generating until POST /continue_generation; new requests wait.

        `abort` ends what runs with what it has, `retract` gives its KV back and computes it again
        afterwards, `in_place` keeps it.
        """
        mode = (await _read(PauseFields, request)).mode
        await halt.pause(MODES[mode], refuse=False, clear_cache=False)
        return json_response(Acknowledged("Generation paused successfully."))

    async def resume(request: Request) -> Response:
        """Go on with what was paused or has waited."""
        await _read(NoFields, request)
        await halt.resume()
        return json_response(Acknowledged("Generation continued successfully."))

    async def abort(request: Request) -> Response:
        """End a request, or all of them, with what they have: their replies come at once, with
        finish_reason.type "abort". Another key's request, and all of them, need operate.
        """
        engine.check_running()
        asked = await _read(AbortFields, request)
        if not asked.abort_all and not asked.rid:
            raise InvalidRequest(
                "rid is absent or empty and abort_all is false; name a request, or set abort_all"
            )
        service.abort(
            [asked.rid] if asked.rid and not asked.abort_all else None, caller_of(request)
        )
        return json_response(Acknowledged("aborted what was open of it"))

    async def flush(request: Request) -> Response:
        """Forget every cached prefix; 400 while sequences run, or are paused with their KV. Those
        that only wait have none.
        """
        await _read(NoFields, request)
        try:
            await halt.clear_cache(unless_held=True)
        except Conflict as busy:
            raise InvalidRequest(busy.message) from None
        return json_response(Acknowledged("Cache flushed."))

    async def begin(request: Request) -> Response:
        """Begin a weight update: what is pushed until POST /end_weight_update becomes live then."""
        engine.check_running()
        await session.begin((await _read(BeginFields, request)).selector)
        return json_response(Outcome(message="Weight update begun."))

    async def end(request: Request) -> Response:
        """Make what was pushed since the update was begun live, in one commit between two steps."""
        await _read(NoFields, request)
        report = await session.end()
        return json_response(
            Outcome(message="Weight update ended.", new_version=report.state.target)
        )

    async def from_disk(request: Request) -> Response:
        """Push weights from a directory: verified first, then live between two steps, or at the end
        of the update that was begun.
        """
        with session.pushing() as update:
            asked = await _read(DiskFields, request)
            in_flight: InFlight = "abort" if asked.abort_all_requests else "continue"
            report = await update.push(
                Manifest(
                    role=update.role,
                    version=asked.weight_version or "",
                    path=asked.model_path,
                    in_flight=in_flight,
                )
            )
        return json_response(
            Outcome(
                message=f"{report.result}: version {report.version}",
                num_paused_requests=len(engine) if halt.paused else 0,
                new_version=report.state.target,
            )
        )

    async def join(request: Request) -> Response:
        """Join the trainer's process group, as the rank `rank_offset`. Answers once all ranks are
        there.
        """
        asked = await _read(GroupFields, request)
        await service.broadcasts.join(
            asked.group_name,
            asked.backend,
            asked.master_address,
            asked.master_port,
            asked.rank_offset,
            asked.world_size,
            prefixed=True,
        )
        return json_response(Outcome(message="Succeeded to initialize the weight update group."))

    async def leave(request: Request) -> Response:
        """Leave a process group; one that is not joined is left already."""
        await service.broadcasts.leave((await _read(LeaveFields, request)).group_name)
        return json_response(Outcome(message="Succeeded to destroy the weight update group."))

    async def from_distributed(request: Request) -> Response:
        """Take the named tensors from the group. Once none of the model's is missing they are live,
        or at the end of the update that was begun.
        """
        with session.pushing() as update:
            engine.check_running()
            content = await _content(DistributedFields, request)
            async with service.broadcasts.announced(content.get("group_name", GROUP)):
                asked = checked(DistributedFields, content)
                tensors = described(asked.names, asked.dtypes, asked.shapes)
            report = await service.broadcasts.push(
                update,
                asked.group_name,
                tensors,
                asked.packing,
                selector=asked.selector,
                version=asked.weight_version or "",
                in_flight="abort" if asked.abort_all_requests else "continue",
            )
        return json_response(
            Outcome(
                message=f"{report.result}: version {report.version}",
                new_version=report.state.target,
            )
        )

    async def from_tensor(request: Request) -> Response:
        """Refused, always: what comes here is pickled, and to read it is to run it."""
        with session.pushing():
            await _read(TensorFields, request)
            raise UnsafeChannel(
                "update_weights_from_tensor carries pickled tensors, and reading a pickle runs what it says; write "
                "safetensors below the weight root and POST /update_weights_from_disk, or push with POST /update_weights"
            )

    async def release(request: Request) -> Response:
        """Give memory back: KV, weights of target and drafter, or all; what runs goes on with the
        same tokens afterwards.
        """
        asked = (await _read(MemoryFields, request)).tags
        await halt.sleep(_memory(asked))
        return json_response(Acknowledged("memory released"))

    async def take_again(request: Request) -> Response:
        """Take memory again, weights bit for bit as they were."""
        asked = (await _read(MemoryFields, request)).tags
        await halt.wake(_memory(asked))
        return json_response(Acknowledged("memory resumed"))

    async def check(request: Request) -> Response:
        """Checksums of everything live, computed anew; or compare them, with a baseline or what was
        remembered: 409 if any differs.
        """
        asked = await _read(CheckFields, request)
        sums, wrong = await service.checker.check(asked)
        if sums is not None:
            return json_response(Outcome(message=f"{len(sums)} tensors", checksums=sums))
        assert wrong is not None
        against = "what was remembered" if asked.baseline is None else "the baseline"
        if not wrong:
            return json_response(
                Outcome(message=f"nothing differs from {against}", match=True, mismatches=wrong)
            )
        said = f"{len(wrong)} tensors differ from {against}: {', '.join(wrong[:8])}; push them again, or roll back"
        return json_response(
            Outcome(success=False, message=said, match=False, mismatches=wrong),
            Conflict.http_status,
        )

    async def read_weights(request: Request) -> Response:
        """The first rows of a live tensor, as numbers; a drafter's name begins with `draft.`. 409
        while the weights change or sleep.
        """
        asked = await _read(ReadFields, request)
        report = await session.ask(
            ReadWeights(engine.command_id(), asked.name, asked.truncate_size)
        )
        return Response(
            await asyncio.to_thread(rows_of, report.values, report.shape),
            media_type="application/json",
        )

    gone = (EngineFailed, Unavailable)
    pushed = (Forbidden, NotFound, Conflict, WeightsRefused, PushFailed, *gone)
    include = Parameter(
        "include", "query", "accepted and without effect: the reply is small", {"type": "string"}
    )
    get, post = partial(Endpoint, "GET"), partial(Endpoint, "POST", optional_body=True)
    change = partial(post, gives=Outcome, error_shape=outcome_of)
    endpoint = partial(
        Endpoint, "POST", needs="push-weights", gives=Outcome, error_shape=outcome_of
    )
    return [
        get("/get_server_info", about, needs="any", gives=ServerInfo),
        get(
            "/health_generate",
            health_generate,
            needs="data",
            gives=Status,
            raises=(
                QueueFull,
                Overloaded,
                QueueTimeout,
                DeadlineExceeded,
                EngineFailed,
                Poisoned,
                Unavailable,
            ),
        ),
        get("/get_model_info", model_info, needs="any", gives=ModelInfo, raises=gone),
        get("/model_info", model_info, needs="any", gives=ModelInfo, raises=gone),
        get("/get_weight_version", weight_version, needs="any", gives=VersionReply, raises=gone),
        get("/v1/loads", loads, needs="any", parameters=(include,), gives=LoadsReply, raises=gone),
        post(
            "/pause_generation",
            pause,
            needs="operate",
            takes=PauseFields,
            gives=Acknowledged,
            raises=gone,
        ),
        post(
            "/continue_generation",
            resume,
            needs="operate",
            takes=NoFields,
            gives=Acknowledged,
            raises=gone,
        ),
        Endpoint(
            "POST",
            "/abort_request",
            abort,
            needs="data",
            takes=AbortFields,
            example={"abort_all": True},
            gives=Acknowledged,
            raises=(Forbidden, *gone),
        ),
        get(
            "/flush_cache",
            flush,
            needs="operate",
            gives=Acknowledged,
            raises=(InvalidRequest, *gone),
        ),
        post(
            "/flush_cache", flush, needs="operate", takes=NoFields, gives=Acknowledged, raises=gone
        ),
        change(
            "/begin_weight_update",
            begin,
            needs="push-weights",
            takes=BeginFields,
            raises=(NotFound, Conflict, *gone),
        ),
        change("/end_weight_update", end, needs="push-weights", takes=NoFields, raises=pushed),
        endpoint(
            "/update_weights_from_disk",
            from_disk,
            takes=DiskFields,
            example={"model_path": "step-7", "weight_version": "7"},
            raises=pushed,
        ),
        endpoint(
            "/init_weights_update_group",
            join,
            takes=GroupFields,
            raises=(Forbidden, Conflict, WeightsRefused, ChannelBroken, *gone),
            example={
                "master_address": "127.0.0.1",
                "master_port": "29500",
                "rank_offset": 1,
                "world_size": 2,
                "group_name": "slime-pp_0",
                "backend": "gloo",
            },
        ),
        change(
            "/destroy_weights_update_group",
            leave,
            needs="push-weights",
            takes=LeaveFields,
            raises=(Conflict, *gone),
        ),
        endpoint(
            "/update_weights_from_distributed",
            from_distributed,
            takes=DistributedFields,
            raises=(ChannelBroken, *pushed),
            example={
                "names": ["model.norm.weight"],
                "dtypes": ["float32"],
                "shapes": [[64]],
                "group_name": "slime-pp_0",
            },
        ),
        change(
            "/update_weights_from_tensor",
            from_tensor,
            needs="push-weights",
            takes=TensorFields,
            raises=(UnsafeChannel,),
        ),
        post(
            "/release_memory_occupation",
            release,
            needs="operate",
            takes=MemoryFields,
            gives=Acknowledged,
            raises=(Conflict, StorageFailed, *gone),
        ),
        post(
            "/resume_memory_occupation",
            take_again,
            needs="operate",
            takes=MemoryFields,
            gives=Acknowledged,
            raises=gone,
        ),
        change(
            "/weights_checker",
            check,
            needs="push-weights",
            takes=CheckFields,
            raises=(Conflict, *gone),
        ),
        get(
            "/get_weights_by_name",
            read_weights,
            needs="push-weights",
            parameters=(
                Parameter("name", "query", "of the tensor", {"type": "string"}),
                Parameter(
                    "truncate_size",
                    "query",
                    "how many of its first rows",
                    {"type": "integer", "default": 100},
                ),
            ),
            gives=Rows,
            raises=(InvalidRequest, NotFound, Conflict, *gone),
        ),
        Endpoint(
            "POST",
            "/get_weights_by_name",
            read_weights,
            needs="push-weights",
            takes=ReadFields,
            example={"name": "model.norm.weight", "truncate_size": 4},
            gives=Rows,
            raises=(NotFound, Conflict, *gone),
        ),
    ]


def _memory(tags: list[Any]) -> list[Memory]:
    return [memory for memory in ALL if memory in tags or not tags]


async def _read(model: type[Model], request: Request) -> Model:
    return checked(model, await _content(model, request))


async def _content(model: type[Model], request: Request) -> dict[str, Any]:
    """Of the body, or without one of the query; nothing at all is an empty object."""
    body = await request.body()
    return without_nulls(
        await read_object(body, next(iter(model.model_fields), "nothing"))
        if body
        else _query(model, request)
    )


def _query(model: type[Model], request: Request) -> dict[str, Any]:
    """What the model takes whole numbers for, as numbers."""
    numbers = {name for name, field in model.model_fields.items() if field.annotation is int}
    return {
        name: int(value) if name in numbers and NUMBER.fullmatch(value) else value
        for name, value in request.query_params.items()
    }
