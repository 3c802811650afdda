"""Items of a batch that have ended, in the native form: results, errors and usage.

`native` replies with the items of a batch, and `rollouts` with those of a rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from tlt_server.errors import TltError
from tlt_server.frontend.dialects.replies.whole import UsageCount
from tlt_server.frontend.generation.items import Event, FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.http.loop_share import Turn
from tlt_server.frontend.http.replies import error_body, json_response, sliced_response
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.service import Service

TAKEN = 256  # items taken in at once, in about 1 ms on a slow core


def phrase(event: Event) -> tuple[str, dict[str, Any]]:
    """Return the name and the data of an event."""
    match event:
        case TokenEvent(id, delta):
            return "token", {
                "id": id,
                **{
                    name: value
                    for name, value in msgspec.structs.asdict(delta).items()
                    if value is not UNSET
                },
            }
        case FinishedItem(id, choices):
            return "result", {"id": id, "choices": choices}
        case FailedItem(id, error):
            return "error", {"id": id, "error": error_body(error)}


class EndedItems:
    """Items that have ended, and the reply that holds them."""

    def __init__(self) -> None:
        self.usage = UsageCount()
        self.errors: list[TltError] = []
        self.by_id: dict[str, dict[str, Any]] = {}

    @classmethod
    async def of(cls, ended: Iterable[FinishedItem | FailedItem], turn: Turn) -> Self:
        """Take in items that have ended, some after each turn."""
        items = cls()
        for i, event in enumerate(ended):
            items.take(event)
            if i % TAKEN == TAKEN - 1:
                await turn(SLICE_BYTES)
        return items

    def take(self, event: FinishedItem | FailedItem) -> None:
        if isinstance(event, FinishedItem):
            self.usage.add(event)
        else:
            self.errors.append(event.error)
        self.by_id[event.id] = phrase(event)[1]

    def content(self, service: Service, ids: Iterable[str]) -> dict[str, Any]:
        """Return the results in the order of `ids`, and their usage."""
        return {"results": [self.by_id[id] for id in ids], **footer(service, self.usage)}

    def whole(self, service: Service, ids: Iterable[str], turn: Turn) -> Response:
        """Return the reply to a batch whose items have all ended."""
        content = self.content(service, ids)
        if len(self.errors) == len(self.by_id):
            return json_response(
                content, self.errors[0].http_status, retry_after_s=self.errors[0].retry_after_s
            )
        return sliced_response(content, turn)


def footer(service: Service, usage: UsageCount) -> dict[str, Any]:
    return {"usage": usage, "numerics": service.numerics}
