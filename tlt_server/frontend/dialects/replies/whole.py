"""A reply in one piece: a part for each choice, in order, and the tokens of the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from msgspec import Struct

from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.http.slices import SLICE_BYTES

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
