"""Token counts of a request in the form of the OpenAI API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class CachedTokens(Struct, frozen=True):
    cached_tokens: Annotated[int, Meta(description="prompt tokens whose KV was there already")]


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: Annotated[int, Meta(description="tokens of all prompts, each counted once")]
    completion_tokens: Annotated[int, Meta(description="tokens of all choices")]
    total_tokens: Annotated[int, Meta(description="sum of both")]
    prompt_tokens_details: Annotated[
        CachedTokens, Meta(description="tokens of the prompts that were not computed again")
    ]
