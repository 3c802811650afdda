"""Whole replies: a part for each choice, in order, or the ended items of a batch in the native
form; and the request's token counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct
from starlette.responses import Response

from tlt_server.errors import TltError
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import Event, FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.http.replies import error_body, json_response, sliced_response
from tlt_server.frontend.http.slices import SLICE_BYTES, Turn
from tlt_server.frontend.service import Service

Part = TypeVar("Part")


class CachedTokens(Struct, frozen=True):
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"]


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: Annotated[int, "tokens of all prompts, each counted once"]
    completion_tokens: Annotated[int, "tokens of all choices"]
    total_tokens: Annotated[int, "sum of both"]
    prompt_tokens_details: Annotated[
        CachedTokens, "tokens of the prompts that were not computed again"
    ]


class UsageCount(Struct):
    """Tokens of the items that have ended with a result, in the native form."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: FinishedItem) -> None:
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += sum(len(choice.token_ids) for choice in result.choices)

    def openai(self) -> OpenAIUsage:
        return OpenAIUsage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            CachedTokens(self.cached_tokens),
        )


async def parts_of(
    generation: Generation,
    batch: RequestBatch,
    make: Callable[[FinishedItem, FinishedChoice], Awaitable[Part]],
) -> tuple[list[Part], UsageCount]:
    """Make a part of each choice; return the parts, prompt by prompt, and the usage. The first item
    that fails raises its error.
    """
    found, count, positions = dict[tuple[int, int], Part](), UsageCount(), batch.positions
    async for event in generation.successes():
        if isinstance(event, FinishedItem):
            count.add(event)
            for choice in event.choices:
                await generation.turn(SLICE_BYTES)  # its text may be decoded again
                found[positions[event.id], choice.index] = await make(event, choice)
    return [found[at] for at in sorted(found)], count


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
        """Collect ended items, some after each turn."""
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
