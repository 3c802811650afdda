"""The native dialect's messages as msgspec structs. Requests leave out what is unset; replies ignore fields they do not know."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class SamplingFields(Struct, kw_only=True, omit_defaults=True):
    """Partial: what is unset falls back to the batch's fields, then to the server's defaults."""

    temperature: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    max_tokens: int | None | UnsetType = UNSET  # None: what the prompt leaves of the model's length
    min_tokens: int | UnsetType = UNSET
    stop: str | list[str] | UnsetType = UNSET
    stop_token_ids: list[int] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    logprobs: int | UnsetType = UNSET
    raw_logprobs: bool | UnsetType = UNSET
    prompt_logprobs: int | None | UnsetType = UNSET


class Item(Struct, kw_only=True, omit_defaults=True):
    """One prompt, given in exactly one of three forms, and how many choices to make of it."""

    id: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    group_id: str | UnsetType = UNSET
    salt: str | UnsetType = UNSET
    n: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    sd: bool | UnsetType = UNSET
    sampling: SamplingFields | dict[str, Any] | UnsetType = UNSET


class GenerateBody(Struct, kw_only=True, omit_defaults=True):
    requests: list[Item | dict[str, Any]]
    sampling: SamplingFields | dict[str, Any] | UnsetType = UNSET
    stream: bool = False
    timeout_s: float | UnsetType = UNSET
    queue_timeout_s: float | UnsetType = UNSET  # a sequence that has not begun by then ends with the error queue_timeout
    detach: bool = False


class VersionSpan(Struct, frozen=True):
    """Output tokens [start, end) were computed by weight version `version`."""

    version: str
    start: int
    end: int


class SdReport(Struct, frozen=True):
    steps: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    mean_accept_length: float | None = None
    histogram: list[int] = []


Alternatives = tuple[list[int], list[float]]  # token ids and their log-probs, best first


class Choice(Struct, frozen=True, kw_only=True):
    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    weight_versions: list[VersionSpan]
    seed: int
    sd: SdReport
    raw_logprobs: list[float] | None = None
    top_logprobs: list[Alternatives] | None = None
    prompt_logprobs: list[Alternatives | None] | None = None


class WireError(Struct, frozen=True):
    code: str
    message: str
    retryable: bool = False


class ItemResult(Struct, frozen=True):
    """One item's end: choices, or an error."""

    id: str
    choices: list[Choice] = []
    error: WireError | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Reply(Struct, frozen=True):
    results: list[ItemResult]
    usage: Usage
    numerics: str


class Progress(Struct, frozen=True):
    items: int
    items_ended: int
    tokens: int


class RolloutStatus(Struct, frozen=True):
    """`status`: running or done; of a rollout just deleted, deleted."""

    id: str
    status: str


class RolloutSummary(Struct, frozen=True):
    """Times are Unix seconds; `detached`: asked for with `detach`, else with an Idempotency-Key alone."""

    id: str
    status: str
    detached: bool
    created_s: float
    done_s: float | None
    bytes: int
    progress: Progress


class RolloutList(Struct, frozen=True):
    rollouts: list[RolloutSummary]


class RolloutReply(Struct, frozen=True):
    """`results`: of the items that have ended, in the order of the request; all of them once `status` is done."""

    id: str
    status: str
    progress: Progress
    results: list[ItemResult]
    usage: Usage
    numerics: str


class Token(Struct, frozen=True, kw_only=True):
    """Streamed: new tokens of choice `index` of item `id`; text may lag behind the tokens."""

    id: str
    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    top_logprobs: list[Alternatives] | None = None
    prompt_logprobs: list[Alternatives | None] | None = None  # with the choice's first tokens


class Done(Struct, frozen=True):
    usage: Usage
    numerics: str


StreamEvent = Token | ItemResult | Done
_EVENTS: dict[str, msgspec.json.Decoder[Any]] = {
    "token": msgspec.json.Decoder(Token), "result": msgspec.json.Decoder(ItemResult),
    "error": msgspec.json.Decoder(ItemResult), "done": msgspec.json.Decoder(Done),
}


class EventParser:
    """Server-sent events from lines; `feed` returns an event when a line completes one."""

    def __init__(self) -> None:
        self._name, self._data = "", ""

    def feed(self, line: str) -> StreamEvent | None:
        if line.startswith("event:"):
            self._name = line[6:].strip()
        elif line.startswith("data:"):
            self._data += line[5:].strip()
        elif not line and self._name in _EVENTS:
            event: StreamEvent = _EVENTS[self._name].decode(self._data)
            self._name, self._data = "", ""
            return event
        return None
