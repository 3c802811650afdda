"""Tokens that a request took, as the OpenAI API counts them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class CachedTokens(Struct, frozen=True):
    cached_tokens: Annotated[int, Meta(description="prompt tokens whose KV was there already")]


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: Annotated[int, Meta(description="of all prompts, each counted once")]
    completion_tokens: Annotated[int, Meta(description="of all choices")]
    total_tokens: Annotated[int, Meta(description="both")]
    prompt_tokens_details: Annotated[
        CachedTokens, Meta(description="what of the prompts was not computed anew")
    ]
