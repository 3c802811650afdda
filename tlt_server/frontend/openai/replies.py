"""What the OpenAI dialect replies: the shapes, which are also those of the OpenAPI document, and errors and figures put into them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from tlt_server.errors import TltError
from tlt_server.frontend.openai.logprobs import ChatLogprobs, Logprobs, PromptLogprobs
from tlt_server.frontend.openai.requests import ChatRequest, CompletionRequest
from tlt_server.frontend.sequence import SdReport
from tlt_server.records import VersionSpan

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Struct, frozen=True):
    """The error envelope."""

    error: Problem


class Speculation(Struct, frozen=True):
    """Speculation of one choice. `acceptance_histogram[k]`: steps that accepted k drafts; `num_spec_tokens`: the most that one did."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(Struct, frozen=True):
    """`speculative_decoding` is null for a choice that never had a draft."""

    speculative_decoding: Speculation | None


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class Speech(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """`message` in a whole reply, `delta` in a chunk of a stream."""

    index: int
    message: Speech | UnsetType = UNSET
    delta: Speech | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Completion(Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET  # of a reply's only choice


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET  # of a reply's only choice


class Model(Struct, frozen=True):
    id: str
    max_model_len: int
    created: int = 0
    object: str = "model"
    owned_by: str = "tlt"


class Models(Struct, frozen=True):
    data: list[Model]
    object: str = "list"


class Tokens(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Struct, frozen=True):
    prompt: str


def failure(error: TltError) -> Failure:
    """Refusals begin with the field that they are about."""
    word = error.message.split(" ")[0].split("[")[0].split(".")[0]
    known = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys() | {"tokens", "add_special_tokens"}
    kind = TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "server_error")
    return Failure(Problem(error.message, kind, word if error.http_status < 500 and word in known else None, error.code))


def figures(sd: SdReport) -> Metrics:
    if not sd.draft_steps:
        return Metrics(None)
    return Metrics(Speculation(
        mean_acceptance_length=1 + sd.accepted / sd.draft_steps,
        draft_acceptance_rate=sd.accepted / sd.drafted if sd.drafted else 0.0,
        acceptance_histogram=sd.histogram, num_spec_steps=sd.draft_steps, num_accepted_draft_tokens=sd.accepted,
        num_draft_tokens=sd.drafted, num_spec_tokens=max(0, len(sd.histogram) - 1)))
