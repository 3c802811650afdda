"""Token counts of a request in the form of the OpenAI API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from tlt_server.frontend.generation.items import FinishedItem


class CachedTokens(Struct, frozen=True):
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"]


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: Annotated[int, "tokens of all prompts, each counted once"]
    completion_tokens: Annotated[int, "tokens of all choices"]
    total_tokens: Annotated[int, "sum of both"]
    prompt_tokens_details: Annotated[
        CachedTokens, "tokens of the prompts that were not computed again"
    ]


class UsageCount:
    """The usage of a request, counted as its items end."""

    def __init__(self) -> None:
        self._prompt = self._cached = self._completion = 0

    def add(self, result: FinishedItem) -> None:
        self._prompt += result.prompt_tokens
        self._cached += result.cached_tokens
        self._completion += sum(len(choice.token_ids) for choice in result.choices)

    def usage(self) -> OpenAIUsage:
        return usage_of(self._prompt, self._completion, self._cached)


def usage_of(prompt: int, completion: int, cached: int) -> OpenAIUsage:
    return OpenAIUsage(prompt, completion, prompt + completion, CachedTokens(cached))
