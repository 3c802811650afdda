"""Routes that push weights and load LoRA adapters, as trainers that drive vLLM call them.

POST /update_weights, which several dialects share, is in `dialects.weights`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from tlt_server.errors import Conflict, InvalidRequest, NotFound, PushFailed
from tlt_server.frontend.dialects.replies.errors import (
    JOINED,
    PUSHED,
    RECEIVED,
    PushReply,
    fault,
    outcome,
)
from tlt_server.frontend.http.endpoints import Routes, read_json, while_running
from tlt_server.frontend.http.fields import AnyFields, Tolerant, shown
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.broadcasts import (
    GROUP,
    BroadcasterFields,
    InitFields,
    UpdateFields,
)
from tlt_server.frontend.weights.checker import CheckFields
from tlt_server.frontend.weights.session import AdapterDirectory, Selector, Version
from tlt_server.settings.wording import nearest
from tlt_server.wire.labels import label_of

ROUTES = Routes(needs="push-weights", error_shape=fault, empty=AnyFields)
RUNNING = while_running(read_json)
RPC = ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update")


class VllmLoad(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName
    lora_path: AdapterDirectory
    load_inplace: Annotated[bool, "replace the adapter of this name; else that is refused"] = False


class VllmUnload(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName


class StartFields(Tolerant, frozen=True, kw_only=True):
    is_checkpoint_format: Annotated[
        bool, "tensors are named as in a checkpoint; false is refused"
    ] = True


class FinishFields(Tolerant, frozen=True, kw_only=True):
    weight_version: Annotated[
        Version | None, "the name of what was pushed; absent: the one it was pushed with"
    ] = None


class RpcCall(Tolerant, frozen=True, kw_only=True):
    method: Annotated[str, Meta(max_length=256)]


class RpcStart(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["skyrl_start_weight_update"], "what POST /start_weight_update does"]
    arguments: Annotated[StartFields, "what that route takes"] = msgspec.field(
        name="kwargs", default_factory=StartFields
    )


class RpcUpdate(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["update_weights_nccl"], "what POST /update_weights does"]
    arguments: Annotated[UpdateFields, "what that route takes"] = msgspec.field(name="kwargs")


class RpcFinish(Tolerant, frozen=True, kw_only=True):
    method: Annotated[Literal["skyrl_finish_weight_update"], "what POST /finish_weight_update does"]
    arguments: Annotated[FinishFields, "what that route takes"] = msgspec.field(
        name="kwargs", default_factory=FinishFields
    )


class VersionFields(Tolerant, frozen=True, kw_only=True):
    new_version: Annotated[Version, "the name"]


class Renamed(Struct, frozen=True):
    new_version: Annotated[str, "the label that the weights have or will have"]
    message: Annotated[str, "what was done"]
    success: Annotated[bool, "always true: a failure is an error"] = True


class VllmDone(Struct, frozen=True):
    message: Annotated[str, "what was done"]


class Results(Struct, frozen=True):
    results: Annotated[list[None], "one null for each replica"]


class WorldSize(Struct, frozen=True):
    world_size: Annotated[int, "ranks that take weights: one for each replica"]


class WeightInfo(Struct, frozen=True):
    weight_version: Annotated[str, "the target's version that is live"]
    drafter_version: Annotated[str, "the drafter's; empty where none can be pushed"]


class CheckReply(Struct, frozen=True, omit_defaults=True):
    """The checksums of live weights, or the result of a comparison or a reset."""

    status: Annotated[Literal["reset"] | None, "what was done; with the action reset"] = None
    checksums: Annotated[
        dict[str, str] | None,
        "checksums of what is live: mix64 of the values, by tensor; with the actions checksum and "
        "snapshot",
    ] = None
    match: Annotated[bool | None, "whether nothing differs; with the action compare"] = None
    mismatches: Annotated[
        list[str] | None, "names of the tensors that differ; with the action compare"
    ] = None


@ROUTES.get("/get_world_size", needs="any")
async def world_size(
    service: Service,
    include_dp: Annotated[str, "accepted and without effect: replicas always count"] = "",
) -> WorldSize:
    """Count the ranks that take weights: one, or the number of a fleet's replicas."""
    return WorldSize(service.engine.replicas.count)


@ROUTES.post(
    "/init_weight_transfer_engine",
    example={
        "init_info": {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
    },
    raises=JOINED,
)
async def init_transfer(service: Service, asked: InitFields) -> VllmDone:
    """Join the trainer's process group with the rank `rank_offset`. The reply comes once all ranks
    have joined.
    """
    await service.broadcasts.join_transfer(asked.init_info)
    return VllmDone("Weight transfer initialized")


@ROUTES.post(
    "/init_broadcaster",
    example={
        "host": "127.0.0.1",
        "port": 29500,
        "rank_offset": 0,
        "inference_world_size": 1,
        "backend": "gloo",
    },
    raises=JOINED,
)
async def init_broadcaster(service: Service, asked: BroadcasterFields) -> VllmDone:
    """Join the trainer's process group, in which `rank_offset` counts servers only. The reply comes
    once all ranks have joined.
    """
    await service.broadcasts.join_transfer(asked.info())
    return VllmDone("Weight transfer initialized")


@ROUTES.post("/shutdown_weight_transfer_engine", raises=(Conflict,))
async def shut_transfer(service: Service) -> VllmDone:
    """Leave the trainer's process group; it is no error if none is joined."""
    await service.broadcasts.leave(GROUP)
    return VllmDone("Weight transfer engine shut down")


@ROUTES.post("/start_weight_update", read=RUNNING, raises=(NotFound, Conflict))
async def start(service: Service, asked: StartFields) -> VllmDone:
    """Start an update of the target's weights; what is pushed until POST /finish_weight_update
    becomes live then.
    """
    await _begin(service, asked, "target")
    return VllmDone("Weight update started")


@ROUTES.post("/start_draft_weight_update", read=RUNNING, raises=(NotFound, Conflict))
async def start_draft(service: Service, asked: StartFields) -> VllmDone:
    """Start an update of the drafter's weights, as POST /start_weight_update does for the
    target.
    """
    await _begin(service, asked, "draft")
    return VllmDone("Weight update started")


async def _begin(service: Service, asked: StartFields, selector: Selector) -> None:
    service.engine.check_running()
    if not asked.is_checkpoint_format:
        raise InvalidRequest(
            "is_checkpoint_format is false; tensors are taken under the names of a checkpoint "
            "only: send them so"
        )
    await service.session.begin(selector)


@ROUTES.post("/finish_weight_update", raises=PUSHED)
async def finish(service: Service, asked: FinishFields) -> PushReply:
    """Make what was pushed since the update started live, in one commit between two steps."""
    return outcome(await service.session.end(asked.weight_version or ""), labelled=True)


@ROUTES.post(
    "/collective_rpc",
    takes=RpcStart | RpcUpdate | RpcFinish,
    example={"method": "skyrl_start_weight_update"},
    raises=RECEIVED,
)
async def collective_rpc(service: Service, request: Request) -> Results:
    """Start, continue or finish a weight update under the names by which SkyRL calls it; no other
    method is called.
    """
    body = await request.body() or b"{}"
    match (await service.bodies.read(RpcCall, body)).method:
        case "skyrl_start_weight_update":
            await _begin(service, (await service.bodies.read(RpcStart, body)).arguments, "target")
        case "update_weights_nccl":
            with service.session.pushing() as update:
                service.engine.check_running()
                async with service.broadcasts.announced(GROUP):
                    asked = await service.bodies.read(RpcUpdate, body)
                await service.broadcasts.push_announced(update, asked.arguments)
        case "skyrl_finish_weight_update":
            finished = await service.bodies.read(RpcFinish, body)
            await service.session.end(finished.arguments.weight_version or "")
        case unknown:
            raise InvalidRequest(
                f"method is {shown(unknown)}{nearest(unknown, RPC)}; this server calls "
                f"{', '.join(RPC)} only"
            )
    return Results([None] * service.engine.replicas.count)


@ROUTES.post(
    "/update_weight_version", example={"new_version": "step-8"}, raises=(Conflict, PushFailed)
)
async def rename(service: Service, asked: VersionFields) -> Renamed:
    """Name the version that the open update pushes, or else the live one; its content stays."""
    await service.session.rename(asked.new_version)
    return Renamed(asked.new_version, f"Weight version updated to {asked.new_version}")


@ROUTES.get("/weight_info", needs="any", engine_fails=True)
async def info(service: Service) -> WeightInfo:
    """Return the versions that are live."""
    state = (await service.session.look()).state
    return WeightInfo(label_of(state.target), label_of(state.drafter))


@ROUTES.post("/weight_checker", raises=(Conflict,))
async def check(service: Service, asked: CheckFields) -> CheckReply:
    """Compute checksums of all live weights, or compare them with a baseline.

    After `reset` a tensor differs from everything until it is pushed again, so that a push which
    was lost is found; what is served stays.
    """
    sums, mismatches = await service.checker.check(asked)
    if asked.resets:
        return CheckReply(status="reset")
    if mismatches is None:
        return CheckReply(checksums=sums)
    return CheckReply(match=not mismatches, mismatches=mismatches)


@ROUTES.post(
    "/v1/load_lora_adapter",
    read=RUNNING,
    example={"lora_name": "math", "lora_path": "adapters/math"},
    raises=PUSHED,
)
async def load_adapter(service: Service, asked: VllmLoad) -> str:
    """Load a LoRA adapter in PEFT's layout from a directory below the weight root. Requests name it
    as their model.
    """
    if asked.lora_name in service.info.adapters and not asked.load_inplace:
        raise InvalidRequest(
            f"lora_name is {shown(asked.lora_name)}, which is loaded already; send load_inplace "
            "true to replace it, or unload it first"
        )
    await service.adapters.load(asked.lora_name, asked.lora_path)
    return f"Success: LoRA adapter {asked.lora_name!r} added successfully."


@ROUTES.post("/v1/unload_lora_adapter", example={"lora_name": "math"}, raises=PUSHED)
async def unload_adapter(service: Service, asked: VllmUnload) -> str:
    """Unload a LoRA adapter. The reply comes when its last request has ended."""
    await service.adapters.unload(asked.lora_name)
    return f"Success: LoRA adapter {asked.lora_name!r} removed successfully."
