"""Routes that push, check and read weights and load LoRA adapters, as trainers that drive SGLang
call them.

POST /update_weights and /update_weight_version, which several dialects share, are in
`dialects.weights` and `dialects.vllm_rl`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import Conflict, NotFound, TltError, UnsafeChannel
from tlt_server.frontend.dialects.replies.errors import JOINED, PUSHED, RECEIVED
from tlt_server.frontend.dialects.sglang.requests import read
from tlt_server.frontend.http.endpoints import Routes, Unread, while_running
from tlt_server.frontend.http.fields import AnyFields, Tolerant
from tlt_server.frontend.http.replies import error_reply, json_response
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.broadcasts import (
    GroupName,
    Packing,
    RanksOfGroup,
    Shapes,
    TensorNames,
    TypeNames,
    described,
)
from tlt_server.frontend.weights.checker import CheckFields
from tlt_server.frontend.weights.session import AdapterDirectory, Selector, Version, WeightDirectory
from tlt_server.wire.commands import InFlight, Manifest, ReadWeights
from tlt_server.wire.labels import label_of

GROUP = "weight_update_group"  # where a trainer names none


class LoadedAdapters(Struct, frozen=True):
    """The LoRA adapters after a change of them."""

    loaded_adapters: Annotated[dict[str, str], "adapter that is loaded -> its version"]
    success: Annotated[bool, "always true: a failure is an error"] = True
    error_message: Annotated[str, "always empty"] = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of a change."""

    success: Annotated[bool, "whether it was made"] = True
    message: Annotated[str, "what was done, or the value, the limit and the remedy"]
    num_paused_requests: Annotated[
        int | UnsetType, "sequences that are open while generation is paused"
    ] = UNSET
    new_version: Annotated[str | UnsetType, "what the weights are called now"] = UNSET
    checksums: Annotated[dict[str, str] | UnsetType, "mix64 of the values, by tensor"] = UNSET
    match: Annotated[bool | UnsetType, "whether nothing differs; of a comparison"] = UNSET
    mismatches: Annotated[
        list[str] | UnsetType, "names of the tensors that differ; of a comparison"
    ] = UNSET


Rows = list[Any]


def rows_of(values: bytes, shape: list[int]) -> bytes:
    """Return `Rows` of float32 as JSON, encoded row by row so that other threads run in between."""
    each = memoryview(values)
    size = len(each) // shape[0]
    rows = (
        each[at : at + size].cast("f", shape[1:]).tolist()
        if shape[1:]
        else each[at : at + size].cast("f")[0]
        for at in range(0, len(each), size)
    )
    return b"[" + b",".join(map(msgspec.json.encode, rows)) + b"]"


def outcome_of(error: TltError) -> Outcome:
    """Return the error in the shape of the weight routes."""
    return Outcome(success=False, message=error.message)


class BeginFields(Tolerant, frozen=True, kw_only=True):
    selector: Annotated[Selector, "the model whose weights are pushed"] = "target"


class PushFields(Tolerant, frozen=True, kw_only=True):
    """The fields that the pushes by all channels share."""

    abort_all_requests: Annotated[
        bool, "end running sequences with what they have; else they continue under the new weights"
    ] = False
    flush_cache: Annotated[
        bool, "accepted and without effect: KV of another version never serves a new request"
    ] = True

    @property
    def in_flight(self) -> InFlight:
        return "abort" if self.abort_all_requests else "continue"


class DiskFields(PushFields, frozen=True, kw_only=True):
    model_path: WeightDirectory
    load_format: Annotated[Literal["auto", "safetensors"], "both mean safetensors"] = "auto"
    weight_version: Annotated[Version | None, "absent: the directory's name and digest"] = None


class SglangLoad(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName
    lora_path: AdapterDirectory


class SglangUnload(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName


class SglangGroup(RanksOfGroup, Tolerant, frozen=True, kw_only=True):
    group_name: GroupName = GROUP


class LeaveFields(Tolerant, frozen=True, kw_only=True):
    group_name: GroupName = GROUP


class GroupOf(Tolerant, frozen=True, kw_only=True):
    """The group of a body whose other fields may be wrong."""

    group_name: Any = GROUP


class DistributedFields(PushFields, frozen=True, kw_only=True):
    names: Annotated[
        TensorNames,
        "names of tensors, in the order in which they are broadcast; those of the drafter may "
        "begin with `draft.`",
    ]
    dtypes: Annotated[TypeNames, 'as torch names them, such as "bfloat16"']
    shapes: Annotated[Shapes, "shapes of the tensors"]
    group_name: GroupName = GROUP
    load_format: Annotated[
        Literal["flattened_bucket"] | None, "all come as one bucket of raw bytes; absent: one each"
    ] = None
    weight_version: Annotated[Version | None, "absent: the channel and the content's digest"] = None
    selector: Annotated[
        Selector | None, "whose weights these are; absent: those of POST /begin_weight_update"
    ] = None

    @property
    def packing(self) -> Packing:
        return Packing(packed=True, bucket_bytes=2**40) if self.load_format else Packing()


class ReadFields(Tolerant, frozen=True, kw_only=True):
    name: Annotated[
        str,
        "name of the tensor, as POST /weight_checker lists it",
        Meta(min_length=1, max_length=1024),
    ]
    truncate_size: Annotated[int, "the number of its first rows", Meta(ge=1, le=4096)] = 100


ROUTES = Routes(needs="push-weights", error_shape=outcome_of, read=read, empty=AnyFields)


@ROUTES.post("/begin_weight_update", read=while_running(read), raises=(NotFound, Conflict))
async def begin(service: Service, asked: BeginFields) -> Outcome:
    """Start a weight update; what is pushed until POST /end_weight_update becomes live then."""
    await service.session.begin(asked.selector)
    return Outcome(message="Weight update begun.")


@ROUTES.post("/end_weight_update", raises=PUSHED)
async def end(service: Service) -> Outcome:
    """Make what was pushed since the update started live, in one commit between two steps."""
    report = await service.session.end()
    return Outcome(message="Weight update ended.", new_version=label_of(report.state.target))


@ROUTES.post(
    "/update_weights_from_disk",
    example={"model_path": "step-7", "weight_version": "7"},
    raises=PUSHED,
)
async def from_disk(service: Service, body: Unread[DiskFields]) -> Outcome:
    """Push weights from a directory.

    They are verified first, then become live between two steps, or at the end of the open update.
    """
    with service.session.pushing() as update:
        asked = await body.read()
        report = await update.push(
            Manifest(
                role=update.role,
                version=asked.weight_version or "",
                labelled=True,
                path=asked.model_path,
                in_flight=asked.in_flight,
            )
        )
    return Outcome(
        message=f"{report.result}: version {label_of(report.version)}",
        num_paused_requests=len(service.engine) if service.engine.pauses.paused else 0,
        new_version=label_of(report.state.target),
    )


@ROUTES.post(
    "/init_weights_update_group",
    example={
        "master_address": "127.0.0.1",
        "master_port": "29500",
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "slime-pp_0",
        "backend": "gloo",
    },
    raises=JOINED,
)
async def join(service: Service, asked: SglangGroup) -> Outcome:
    """Join the trainer's process group with the rank `rank_offset`. The reply comes once all ranks
    have joined.
    """
    await service.broadcasts.join(asked.group_name, asked, prefixed=True)
    return Outcome(message="Succeeded to initialize the weight update group.")


@ROUTES.post("/destroy_weights_update_group", raises=(Conflict,))
async def leave(service: Service, asked: LeaveFields) -> Outcome:
    """Leave a process group; it is no error if the group is not joined."""
    await service.broadcasts.leave(asked.group_name)
    return Outcome(message="Succeeded to destroy the weight update group.")


@ROUTES.post(
    "/update_weights_from_distributed",
    takes=DistributedFields,
    example={
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[64]],
        "group_name": "slime-pp_0",
    },
    raises=RECEIVED,
)
async def from_distributed(service: Service, request: Request) -> Outcome:
    """Receive the named tensors from the group.

    They become live once no tensor of the model is missing, or at the end of the open update.
    """
    with service.session.pushing() as update:
        service.engine.check_running()
        group = (await read(service, GroupOf, request)).group_name
        async with service.broadcasts.announced(group):
            asked = await read(service, DistributedFields, request)
            tensors = await asyncio.to_thread(described, asked.names, asked.dtypes, asked.shapes)
        report = await service.broadcasts.push(
            update,
            asked.group_name,
            tensors,
            asked.packing,
            selector=asked.selector,
            version=asked.weight_version or "",
            in_flight=asked.in_flight,
        )
    return Outcome(
        message=f"{report.result}: version {label_of(report.version)}",
        new_version=label_of(report.state.target),
    )


@ROUTES.post("/update_weights_from_tensor", engine_fails=False, raises=(UnsafeChannel,))
async def from_tensor(service: Service, body: Unread[AnyFields]) -> Outcome:
    """Refuse, always: the body is a pickle, and to read a pickle is to run it."""
    with service.session.pushing():
        await body.read()
        raise UnsafeChannel(
            "update_weights_from_tensor carries pickled tensors, and reading a pickle runs what it "
            "says; write safetensors below the weight root and POST /update_weights_from_disk, or "
            "push with POST /update_weights"
        )


@ROUTES.post("/weights_checker", raises=(Conflict,))
async def check(service: Service, asked: CheckFields) -> Annotated[Response, Outcome]:
    """Compute checksums of all live weights, or compare them with a baseline or with those that
    were remembered; 409 if any differs.

    After `reset_tensors` a tensor differs from everything until it is pushed again.
    """
    sums, wrong = await service.checker.check(asked)
    if asked.resets:
        return json_response(Outcome(message="reset: all differs until it is pushed again"))
    if sums is not None:
        return json_response(Outcome(message=f"{len(sums)} tensors", checksums=sums))
    assert wrong is not None
    against = "what was remembered" if asked.baseline is None else "the baseline"
    if not wrong:
        return json_response(
            Outcome(message=f"nothing differs from {against}", match=True, mismatches=wrong)
        )
    message = (
        f"{len(wrong)} tensors differ from {against}: {', '.join(wrong[:8])}; push them again, or "
        "roll back"
    )
    return json_response(
        Outcome(success=False, message=message, match=False, mismatches=wrong), Conflict.http_status
    )


@ROUTES.post(
    "/get_weights_by_name",
    example={"name": "model.norm.weight", "truncate_size": 4},
    raises=(NotFound, Conflict),
    error_shape=error_reply,
)
@ROUTES.get("/get_weights_by_name", raises=(NotFound, Conflict), error_shape=error_reply)
async def read_weights(service: Service, asked: ReadFields) -> Annotated[Response, Rows]:
    """Read the first rows of a live tensor, as numbers; 409 while the weights change or sleep.

    The name of a drafter's tensor begins with `draft.`.
    """
    report = await service.session.ask(ReadWeights, asked.name, asked.truncate_size)
    return Response(
        await asyncio.to_thread(rows_of, report.values, report.shape), media_type="application/json"
    )


@ROUTES.post(
    "/load_lora_adapter", example={"lora_name": "math", "lora_path": "adapters/math"}, raises=PUSHED
)
async def load_adapter(service: Service, asked: SglangLoad) -> LoadedAdapters:
    """Load a LoRA adapter in PEFT's layout from a directory below the weight root, in place of the
    one that has the name. Requests name it as their lora_path.
    """
    report = await service.adapters.load(asked.lora_name, asked.lora_path)
    return LoadedAdapters(report.state.adapters)


@ROUTES.post("/unload_lora_adapter", example={"lora_name": "math"}, raises=PUSHED)
async def unload_adapter(service: Service, asked: SglangUnload) -> LoadedAdapters:
    """Unload a LoRA adapter. The reply comes when its last request has ended."""
    report = await service.adapters.unload(asked.lora_name)
    return LoadedAdapters(report.state.adapters)


@ROUTES.post("/load_lora_adapter_from_tensors", engine_fails=False, raises=(UnsafeChannel,))
async def load_from_tensors(service: Service) -> LoadedAdapters:
    """Refuse, always: the body is a pickle, and to read a pickle is to run it."""
    raise UnsafeChannel(
        "load_lora_adapter_from_tensors carries pickled tensors, and reading a pickle runs what it "
        "says; write safetensors below the weight root and POST /load_lora_adapter, or push with "
        "POST /update_weights and role adapter"
    )
