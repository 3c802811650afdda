"""The dialect `areal`: the routes that AReaL adds to its vLLM servers.

AReaL generates by OpenAI's routes and sleeps by vLLM's; these pause and push weights. A broadcast
takes two calls: the first describes the tensors, the second receives them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Struct

from tlt_server.errors import Conflict, TltError
from tlt_server.frontend.dialects.replies.errors import JOINED, PUSHED, RECEIVED
from tlt_server.frontend.http.endpoints import Routes, Unread
from tlt_server.frontend.http.fields import AnyFields, Tolerant
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.broadcasts import (
    GroupName,
    Packing,
    Rank,
    RanksOfGroup,
    Shapes,
    TensorNames,
    TypeNames,
    described,
)
from tlt_server.frontend.weights.session import WeightDirectory
from tlt_server.wire.commands import Manifest
from tlt_server.wire.events import WeightReport
from tlt_server.wire.labels import label_of

GROUP = "areal"  # where a trainer names none


class ArealOutcome(Struct, frozen=True):
    """The outcome of a change."""

    success: Annotated[bool, "whether it was made"]
    message: Annotated[str, "what was done, or the value, the limit and the remedy"]


class DirectoryPush(Tolerant, frozen=True, kw_only=True):
    model_path: WeightDirectory


class GroupOfRanks(RanksOfGroup, Tolerant, frozen=True, kw_only=True):
    rank_offset: Rank
    group_name: GroupName = GROUP


class DescribedTensors(Tolerant, frozen=True, kw_only=True):
    names: Annotated[TensorNames, "names of tensors, in the order in which they are broadcast"]
    dtypes: Annotated[TypeNames, 'as torch names them, such as "bfloat16"']
    shapes: Annotated[Shapes, "shapes of the tensors"]
    group_name: GroupName = GROUP


def failed(error: TltError) -> ArealOutcome:
    return ArealOutcome(False, error.message)


ROUTES = Routes(error_shape=failed, empty=AnyFields)


@ROUTES.post("/areal_pause_generation", needs="operate")
async def pause(service: Service) -> ArealOutcome:
    """End running sequences with what they have; new requests wait for
    POST /areal_continue_generation.
    """
    await service.engine.pauses.pause("abort", refuse=False, clear_cache=True)
    return ArealOutcome(True, "Generation paused and all requests aborted")


@ROUTES.post("/areal_continue_generation", needs="operate")
async def resume(service: Service) -> ArealOutcome:
    """Start what has waited, and take new requests."""
    await service.engine.pauses.resume()
    return ArealOutcome(True, "Generation continued")


@ROUTES.post(
    "/areal_update_weights", needs="push-weights", example={"model_path": "step-7"}, raises=PUSHED
)
async def from_disk(service: Service, body: Unread[DirectoryPush]) -> ArealOutcome:
    """Push weights from a directory; running sequences end with what they have."""
    with service.session.pushing() as update:
        asked = await body.read()
        report = await update.push(
            Manifest(role=update.role, labelled=True, path=asked.model_path, in_flight="abort")
        )
    return _outcome(report)


@ROUTES.post(
    "/areal_init_weights_update_group",
    needs="push-weights",
    example={
        "master_address": "127.0.0.1",
        "master_port": "29500",
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
        "group_name": "areal-0",
    },
    raises=JOINED,
)
async def join(service: Service, asked: GroupOfRanks) -> ArealOutcome:
    """Join the trainer's process group with the rank `rank_offset`. The reply comes once all ranks
    have joined.
    """
    await service.broadcasts.join(asked.group_name, asked, prefixed=True)
    return ArealOutcome(True, "the group is joined")


@ROUTES.post(
    "/areal_set_update_weight_meta",
    needs="push-weights",
    engine_fails=False,
    example={"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]},
)
async def describe(service: Service, asked: DescribedTensors) -> ArealOutcome:
    """Describe the tensors that the next POST /areal_update_weights_xccl receives."""
    tensors = await asyncio.to_thread(described, asked.names, asked.dtypes, asked.shapes)
    service.broadcasts.described = (asked.group_name, tensors)
    return ArealOutcome(True, f"{len(tensors)} tensors are described")


@ROUTES.post("/areal_update_weights_xccl", needs="push-weights", raises=RECEIVED)
async def from_group(service: Service, body: Unread[AnyFields]) -> ArealOutcome:
    """Receive the tensors that were described; running sequences end with what they have.

    They become live once no tensor of the model is missing.
    """
    with service.session.pushing() as update:
        service.engine.check_running()
        await body.read()
        if service.broadcasts.described is None:
            raise Conflict(
                "no tensors are described; POST /areal_set_update_weight_meta before this"
            )
        group, tensors = service.broadcasts.described
        service.broadcasts.described = None
        report = await service.broadcasts.push(update, group, tensors, Packing(), in_flight="abort")
    return _outcome(report)


def _outcome(report: WeightReport) -> ArealOutcome:
    return ArealOutcome(True, f"{report.result}: version {label_of(report.version)}")
