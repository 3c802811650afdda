"""The figures of a choice in SGLang's form, `meta_info`, which its chat completions have too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_client.wire import VersionSpan
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.wire.labels import label_of

Triple = tuple[float | None, int, str | None]  # log-prob, token id, and its text if asked for


class Finish(Struct, frozen=True):
    """The end of a choice."""

    type: Annotated[Literal["stop", "length", "abort"], "the kind of end"]
    matched: Annotated[
        int | str | UnsetType, "the stop token's id or the stop string; of a stop"
    ] = UNSET
    length: Annotated[int | UnsetType, "output tokens; of an end by length"] = UNSET
    message: Annotated[str | UnsetType, "why; of an abort"] = UNSET


class MetaInfo(Struct, frozen=True, kw_only=True):
    id: Annotated[str, "the request's rid, numbered where there are several choices"]
    finish_reason: Annotated[Finish | None, "what ended it; null in a chunk that does not"]
    prompt_tokens: Annotated[int, "tokens of its prompt"]
    completion_tokens: Annotated[int, "tokens of its output so far"]
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"]
    weight_version: Annotated[str, "version that computed the last token, or else the live version"]
    weight_versions: Annotated[
        list[VersionSpan] | UnsetType, "which weights computed which tokens; at the end"
    ] = UNSET
    e2e_latency: Annotated[float, "seconds since the request was accepted"]
    output_token_logprobs: Annotated[
        list[Triple] | UnsetType,
        "per output token its log-prob, its id, and its text or null; with return_logprob",
    ] = UNSET
    output_top_logprobs: Annotated[
        list[list[Triple]] | UnsetType,
        "per output token the best alternatives; with top_logprobs_num",
    ] = UNSET
    input_token_logprobs: Annotated[
        list[Triple] | UnsetType,
        "per prompt token from logprob_start_len on; the log-prob of the very first one is null; "
        "with -1 only the last token, with null; with return_logprob",
    ] = UNSET
    input_top_logprobs: Annotated[
        list[list[Triple] | None] | UnsetType,
        "per prompt token the best alternatives; where asked for",
    ] = UNSET
    spec_verify_ct: Annotated[int | UnsetType, "steps that verified a draft; at the end"] = UNSET
    spec_accept_length: Annotated[
        float | UnsetType,
        "tokens per such step, the bonus token included; 1 without one; at the end",
    ] = UNSET
    spec_accept_rate: Annotated[
        float | UnsetType, "the fraction of verified drafts that was accepted; at the end"
    ] = UNSET
    spec_accept_token_num: Annotated[int | UnsetType, "drafts accepted; at the end"] = UNSET
    spec_draft_token_num: Annotated[int | UnsetType, "drafts verified; at the end"] = UNSET


def ended(meta: MetaInfo, choice: FinishedChoice, **more: Any) -> MetaInfo:
    """Return the figures of a choice with what only its end tells."""
    sd, versions = choice.sd, choice.weight_versions
    return msgspec.structs.replace(
        meta,
        finish_reason=_finish(choice),
        weight_versions=versions,
        weight_version=label_of(versions[-1].version) if versions else meta.weight_version,
        spec_verify_ct=sd.draft_steps,
        spec_accept_length=sd.mean_accept_length or 1.0,
        spec_accept_rate=sd.accepted / sd.drafted if sd.drafted else 0.0,
        spec_accept_token_num=sd.accepted,
        spec_draft_token_num=sd.drafted,
        **more,
    )


def _finish(choice: FinishedChoice) -> Finish:
    match choice.finish_reason:
        case "stop":
            return Finish(
                "stop", matched=UNSET if choice.stop_reason is None else choice.stop_reason
            )
        case "length":
            return Finish("length", length=len(choice.token_ids))
        case "abort":
            return Finish(
                "abort",
                message="the request was aborted; this is what it had: send prompt and output "
                "again to continue",
            )
