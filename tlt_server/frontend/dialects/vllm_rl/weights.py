"""Routes that push weights, as trainers that drive vLLM call them.

POST /update_weights, which several dialects share, is in `dialects.weights`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    WeightsRefused,
)
from tlt_server.frontend.dialects.replies.errors import GONE
from tlt_server.frontend.dialects.replies.pushes import PushReply, outcome
from tlt_server.frontend.dialects.vllm_rl.replies import (
    CheckReply,
    Renamed,
    Results,
    VllmDone,
    WeightInfo,
    WorldSize,
    fault,
)
from tlt_server.frontend.dialects.vllm_rl.requests import (
    FinishFields,
    RpcCall,
    RpcFinish,
    RpcStart,
    RpcUpdate,
    StartFields,
    VersionFields,
)
from tlt_server.frontend.http.endpoints import Parameter, Routes
from tlt_server.frontend.http.fields import AnyFields, shown
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.checker import CheckFields
from tlt_server.frontend.weights.session import Selector
from tlt_server.frontend.weights.transfer import GROUP, BroadcasterFields, InitFields
from tlt_server.labels import label_of
from tlt_server.wording import nearest

ROUTES = Routes(error_shape=fault)
JOINS = (Forbidden, Conflict, WeightsRefused, ChannelBroken, *GONE)
RPC = ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update")
INCLUDE_DP = Parameter("include_dp", "query", "accepted and without effect: there is one replica")


@ROUTES.get("/get_world_size", needs="any", parameters=(INCLUDE_DP,), gives=WorldSize)
async def world_size(service: Service, request: Request) -> Response:
    """Count the ranks of this server that take weights."""
    return json_response(WorldSize())


@ROUTES.post(
    "/init_weight_transfer_engine",
    needs="push-weights",
    takes=InitFields,
    example={
        "init_info": {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
    },
    gives=VllmDone,
    raises=JOINS,
)
async def init_transfer(service: Service, request: Request) -> Response:
    """Join the trainer's process group with the rank `rank_offset`. The reply comes once all ranks
    have joined.
    """
    await service.transfer.join((await service.bodies.of(request, InitFields)).init_info)
    return json_response(VllmDone("Weight transfer initialized"))


@ROUTES.post(
    "/init_broadcaster",
    needs="push-weights",
    takes=BroadcasterFields,
    example={
        "host": "127.0.0.1",
        "port": 29500,
        "rank_offset": 0,
        "inference_world_size": 1,
        "backend": "gloo",
    },
    gives=VllmDone,
    raises=JOINS,
)
async def init_broadcaster(service: Service, request: Request) -> Response:
    """Join the trainer's process group, in which `rank_offset` counts servers only. The reply comes
    once all ranks have joined.
    """
    await service.transfer.join((await service.bodies.of(request, BroadcasterFields)).info())
    return json_response(VllmDone("Weight transfer initialized"))


@ROUTES.post(
    "/shutdown_weight_transfer_engine",
    needs="push-weights",
    takes=AnyFields,
    optional_body=True,
    gives=VllmDone,
    raises=(Conflict, *GONE),
)
async def shut_transfer(service: Service, request: Request) -> Response:
    """Leave the trainer's process group; it is no error if none is joined."""
    await service.bodies.of(request, AnyFields)
    await service.broadcasts.leave(GROUP)
    return json_response(VllmDone("Weight transfer engine shut down"))


@ROUTES.post(
    "/start_weight_update",
    needs="push-weights",
    takes=StartFields,
    optional_body=True,
    gives=VllmDone,
    raises=(NotFound, Conflict, *GONE),
)
async def start(service: Service, request: Request) -> Response:
    """Start an update of the target's weights; what is pushed until POST /finish_weight_update
    becomes live then.
    """
    return await _start(service, request, "target")


@ROUTES.post(
    "/start_draft_weight_update",
    needs="push-weights",
    takes=StartFields,
    optional_body=True,
    gives=VllmDone,
    raises=(NotFound, Conflict, *GONE),
)
async def start_draft(service: Service, request: Request) -> Response:
    """Start an update of the drafter's weights, as POST /start_weight_update does for the
    target.
    """
    return await _start(service, request, "draft")


async def _start(service: Service, request: Request, selector: Selector) -> Response:
    await _begin(service, await service.bodies.of(request, StartFields), selector)
    return json_response(VllmDone("Weight update started"))


async def _begin(service: Service, asked: StartFields, selector: Selector) -> None:
    service.engine.check_running()
    if not asked.is_checkpoint_format:
        raise InvalidRequest(
            "is_checkpoint_format is false; tensors are taken under the names of a checkpoint "
            "only: send them so"
        )
    await service.session.begin(selector)


@ROUTES.post(
    "/finish_weight_update",
    needs="push-weights",
    takes=FinishFields,
    optional_body=True,
    gives=PushReply,
    raises=(NotFound, Conflict, WeightsRefused, PushFailed, *GONE),
)
async def finish(service: Service, request: Request) -> Response:
    """Make what was pushed since the update started live, in one commit between two steps."""
    asked = await service.bodies.of(request, FinishFields)
    return outcome(await service.session.end(asked.weight_version or ""), labelled=True)


@ROUTES.post(
    "/collective_rpc",
    needs="push-weights",
    takes=RpcStart | RpcUpdate | RpcFinish,
    example={"method": "skyrl_start_weight_update"},
    gives=Results,
    raises=(NotFound, Conflict, WeightsRefused, ChannelBroken, PushFailed, *GONE),
)
async def collective_rpc(service: Service, request: Request) -> Response:
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
                await service.transfer.push(update, asked.arguments)
        case "skyrl_finish_weight_update":
            finished = await service.bodies.read(RpcFinish, body)
            await service.session.end(finished.arguments.weight_version or "")
        case unknown:
            raise InvalidRequest(
                f"method is {shown(unknown)}{nearest(unknown, RPC)}; this server calls "
                f"{', '.join(RPC)} only"
            )
    return json_response(Results([None]))


@ROUTES.post(
    "/update_weight_version",
    needs="push-weights",
    takes=VersionFields,
    example={"new_version": "step-8"},
    gives=Renamed,
    raises=(Conflict, PushFailed, *GONE),
)
async def rename(service: Service, request: Request) -> Response:
    """Name the version that the open update pushes, or else the live one; its content stays."""
    label = (await service.bodies.of(request, VersionFields)).new_version
    await service.session.rename(label)
    return json_response(Renamed(label, f"Weight version updated to {label}"))


@ROUTES.get("/weight_info", needs="any", gives=WeightInfo, raises=GONE)
async def info(service: Service, request: Request) -> Response:
    """Return the versions that are live."""
    state = (await service.session.look()).state
    return json_response(WeightInfo(label_of(state.target), label_of(state.drafter)))


@ROUTES.post(
    "/weight_checker",
    needs="push-weights",
    takes=CheckFields,
    optional_body=True,
    gives=CheckReply,
    raises=(Conflict, *GONE),
)
async def check(service: Service, request: Request) -> Response:
    """Compute checksums of all live weights, or compare them with a baseline.

    After `reset` a tensor differs from everything until it is pushed again, so that a push which
    was lost is found; what is served stays.
    """
    asked = await service.bodies.of(request, CheckFields)
    sums, mismatches = await service.checker.check(asked)
    if asked.resets:
        return json_response(CheckReply(status="reset"))
    if mismatches is None:
        return json_response(CheckReply(checksums=sums))
    return json_response(CheckReply(match=not mismatches, mismatches=mismatches))
