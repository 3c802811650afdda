"""Routes to join and leave process groups, through which weights are broadcast."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    EngineFailed,
    Forbidden,
    Unavailable,
    WeightsRefused,
)
from tlt_server.frontend.dialects.weights.requests import GroupFields
from tlt_server.frontend.http.endpoints import Parameter, Routes
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service

ROUTES = Routes()
GONE = (EngineFailed, Unavailable)


class GroupsReply(Struct, frozen=True):
    """The process groups after the call."""

    groups: Annotated[list[str], Meta(description="process groups that are joined")]


@ROUTES.post(
    "/weight_groups",
    needs="push-weights",
    takes=GroupFields,
    gives=GroupsReply,
    raises=(Forbidden, Conflict, WeightsRefused, ChannelBroken, *GONE),
)
async def join(service: Service, request: Request) -> Response:
    """Join a trainer's process group, for pushes by broadcast. The reply comes once all ranks have
    joined.
    """
    asked = await service.bodies.of(request, GroupFields)
    return json_response(
        GroupsReply(
            await service.broadcasts.join(
                asked.name,
                asked.backend,
                asked.master_address,
                asked.master_port,
                asked.rank_offset,
                asked.world_size,
                prefixed=asked.prefixed,
            )
        )
    )


@ROUTES.delete(
    "/weight_groups/{name}",
    needs="push-weights",
    parameters=(Parameter("name", "path", "the name of the group"),),
    gives=GroupsReply,
    raises=(Conflict, *GONE),
)
async def leave(service: Service, request: Request) -> Response:
    """Leave a process group; it is no error if the group is not joined."""
    return json_response(GroupsReply(await service.broadcasts.leave(request.path_params["name"])))
