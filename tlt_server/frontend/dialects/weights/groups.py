"""Routes to join and leave process groups, through which weights are broadcast."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from tlt_server.errors import Conflict
from tlt_server.frontend.dialects.replies.errors import JOINED
from tlt_server.frontend.dialects.weights.requests import GroupFields
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.service import Service

ROUTES = Routes()


class GroupsReply(Struct, frozen=True):
    """The process groups after the call."""

    groups: Annotated[list[str], "process groups that are joined"]


@ROUTES.post("/weight_groups", needs="push-weights", raises=JOINED)
async def join(service: Service, asked: GroupFields) -> GroupsReply:
    """Join a trainer's process group, for pushes by broadcast. The reply comes once all ranks have
    joined.
    """
    return GroupsReply(await service.broadcasts.join(asked.name, asked, prefixed=asked.prefixed))


@ROUTES.delete("/weight_groups/{name}", needs="push-weights", raises=(Conflict,))
async def leave(service: Service, name: Annotated[str, "the name of the group"]) -> GroupsReply:
    """Leave a process group; it is no error if the group is not joined."""
    return GroupsReply(await service.broadcasts.leave(name))
