"""Replies of the dialect `sglang`. Errors of its weight routes have the key `success`; those of its
other routes have the native shape.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_server.errors import TltError
from tlt_server.frontend.dialects.replies.meta_info import MetaInfo


class Generated(Struct, frozen=True, kw_only=True):
    """One choice; in a stream all of it so far."""

    text: Annotated[str, "the output as text"]
    output_ids: Annotated[list[int], "the output, its stop token included"]
    meta_info: Annotated[MetaInfo, "figures of it"]
    index: Annotated[
        int | UnsetType, "p * n + i for choice i of prompt p; in a stream of several"
    ] = UNSET


class LoadedAdapters(Struct, frozen=True):
    """The LoRA adapters after a change of them."""

    loaded_adapters: Annotated[dict[str, str], "adapter that is loaded -> its version"]
    success: Annotated[bool, "always true: a failure is an error"] = True
    error_message: Annotated[str, "always empty"] = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of a change."""

    success: Annotated[bool, "whether it was made"] = True
    message: Annotated[str, "what was done, or the value, the limit and the remedy"]
    num_paused_requests: Annotated[
        int | UnsetType, "sequences that are open while generation is paused"
    ] = UNSET
    new_version: Annotated[str | UnsetType, "what the weights are called now"] = UNSET
    checksums: Annotated[dict[str, str] | UnsetType, "mix64 of the values, by tensor"] = UNSET
    match: Annotated[bool | UnsetType, "whether nothing differs; of a comparison"] = UNSET
    mismatches: Annotated[
        list[str] | UnsetType, "names of the tensors that differ; of a comparison"
    ] = UNSET


class Acknowledged(Struct, frozen=True):
    """The answer to a call that has succeeded."""

    message: Annotated[str, "the change that was made"]
    status: Annotated[Literal["ok"], "always the same"] = "ok"


class Aborted(Acknowledged, frozen=True, kw_only=True):
    """The answer to an abort."""

    aborted: Annotated[int, "sequences that this ends"]


class ModelInfo(Struct, frozen=True, kw_only=True):
    model_path: Annotated[str, "the directory of the model"]
    tokenizer_path: Annotated[str, "the same"]
    is_generation: Annotated[bool, "always true"] = True
    weight_version: Annotated[str, "the target's version that is live"]
    served_model_name: Annotated[str, "the name of the served model"]


class VersionReply(Struct, frozen=True):
    weight_version: Annotated[str, "the target's version that is live"]


class Loads(Struct, frozen=True, kw_only=True):
    """The load of one replica."""

    dp_rank: Annotated[int, "always 0"] = 0
    num_running_reqs: Annotated[int, "sequences that decode"]
    num_waiting_reqs: Annotated[int, "sequences that wait"]
    num_total_reqs: Annotated[int, "sequences accepted and not ended"]
    num_used_tokens: Annotated[int, "positions of KV pages in use"]
    max_total_num_tokens: Annotated[int, "positions of all KV pages"]
    max_running_requests: Annotated[int, "sequences that decode at once"]
    token_usage: Annotated[float, "the fraction of the positions in use"]


class LoadsReply(Struct, frozen=True, kw_only=True):
    timestamp: Annotated[float, "Unix seconds"]
    version: Annotated[str, "version of the server"]
    dp_rank_count: Annotated[int, "always 1"] = 1
    loads: Annotated[list[Loads], "load of the one replica"]


Rows = list[Any]


def rows_of(values: bytes, shape: list[int]) -> bytes:
    """Return `Rows` of float32 as JSON, made row by row so that other threads run in between."""
    each = memoryview(values)
    size = len(each) // shape[0]
    rows = (
        each[at : at + size].cast("f", shape[1:]).tolist()
        if shape[1:]
        else each[at : at + size].cast("f")[0]
        for at in range(0, len(each), size)
    )
    return b"[" + b",".join(map(msgspec.json.encode, rows)) + b"]"


def outcome_of(error: TltError) -> Outcome:
    """Return the error in the shape of the weight routes."""
    return Outcome(success=False, message=error.message)
