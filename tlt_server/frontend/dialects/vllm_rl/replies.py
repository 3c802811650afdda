"""Replies of the dialect `vllm_rl`, its errors included."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Literal

from msgspec import Struct

from tlt_client.wire import FinishReason, VersionSpan
from tlt_server.errors import TltError
from tlt_server.frontend.dialects.replies.logprobs import ChatLogprobs, PromptLogprobs
from tlt_server.frontend.dialects.replies.usage import OpenAIUsage


class Fault(Struct, frozen=True):
    message: Annotated[str, "the value, the limit and the remedy"]
    type: Annotated[str, "the status in words"]
    param: Annotated[None, "always null"]
    code: Annotated[int, "the status"]


class Faulty(Struct, frozen=True):
    """The error envelope."""

    error: Annotated[Fault, "what went wrong"]


class Paused(Struct, frozen=True):
    status: Annotated[Literal["paused", "resumed"], "what holds now"]


class IsPaused(Struct, frozen=True):
    is_paused: Annotated[bool, "whether a pause holds"]


class IsSleeping(Struct, frozen=True):
    is_sleeping: Annotated[bool, "whether any memory is given back"]


class VllmAborted(Struct, frozen=True):
    aborted: Annotated[int, "sequences that this ends"]
    status: Annotated[Literal["aborted"], "always the same"] = "aborted"


class Renamed(Struct, frozen=True):
    new_version: Annotated[str, "the label that the weights have or will have"]
    message: Annotated[str, "what was done"]
    success: Annotated[bool, "always true: a failure is an error"] = True


class VllmDone(Struct, frozen=True):
    message: Annotated[str, "what was done"]


class Succeeded(Struct, frozen=True):
    success: Annotated[bool, "always true: a failure is an error"] = True


class Results(Struct, frozen=True):
    results: Annotated[list[None], "one null for the one rank"]


class WorldSize(Struct, frozen=True):
    world_size: Annotated[int, "ranks that take weights: one"] = 1


class Load(Struct, frozen=True):
    server_load: Annotated[int, "sequences accepted and not ended"]


class ServerVersion(Struct, frozen=True):
    version: Annotated[str, "version of the server"]


class WeightInfo(Struct, frozen=True):
    weight_version: Annotated[str, "the target's version that is live"]
    drafter_version: Annotated[str, "the drafter's; empty where none can be pushed"]


class CheckReply(Struct, frozen=True, omit_defaults=True):
    """The checksums of live weights, or the result of a comparison or a reset."""

    status: Annotated[Literal["reset"] | None, "what was done; with the action reset"] = None
    checksums: Annotated[
        dict[str, str] | None,
        "checksums of what is live: mix64 of the values, by tensor; with the actions checksum and "
        "snapshot",
    ] = None
    match: Annotated[bool | None, "whether nothing differs; with the action compare"] = None
    mismatches: Annotated[
        list[str] | None, "names of the tensors that differ; with the action compare"
    ] = None


class TokensChoice(Struct, frozen=True):
    index: Annotated[int, "which of the n choices, from 0"]
    token_ids: Annotated[list[int], "the output, its stop token included"]
    finish_reason: Annotated[FinishReason, "what ended it"]
    stop_reason: Annotated[
        int | str | None, "the stop token's id or the stop string; null for another end"
    ]
    logprobs: Annotated[
        ChatLogprobs | None,
        "log-probs of the tokens, if asked for; tokens are named `token_id:<id>`",
    ]
    weight_versions: Annotated[list[VersionSpan], "which weights computed which tokens"]


class TokensReply(Struct, frozen=True):
    request_id: Annotated[str, "as the request gave it, or as it was numbered"]
    choices: Annotated[list[TokensChoice], "the n choices"]
    prompt_logprobs: Annotated[
        PromptLogprobs | None, "per prompt token, null for the first; where asked for"
    ]
    usage: Annotated[OpenAIUsage, "tokens of the request"]


def fault(error: TltError) -> Faulty:
    """Return the error in vLLM's envelope."""
    known = error.http_status in {status.value for status in HTTPStatus}
    return Faulty(
        Fault(
            error.message,
            HTTPStatus(error.http_status).phrase if known else "Client Closed Request",
            None,
            error.http_status,
        )
    )
