"""The native dialect's replies as msgspec structs, which ignore unknown fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Struct

FinishReason = Literal["stop", "length", "abort"]


class VersionSpan(Struct, frozen=True):
    """Output tokens [start, end) were computed by weight version `version`."""

    version: Annotated[str, "the weight version that computed these output tokens"]
    start: Annotated[int, "the first of them, counted from 0"]
    end: Annotated[int, "one past the last"]


class SdReport(Struct, frozen=True):
    """Speculation of one choice."""

    steps: Annotated[int, "that emitted tokens"] = 0
    draft_steps: Annotated[int, "of those, with at least one draft row"] = 0
    drafted: Annotated[int, "draft rows verified"] = 0
    accepted: Annotated[int, "drafts accepted, also those that a stop cut off"] = 0
    mean_accept_length: Annotated[
        float | None,
        "tokens per step that had a draft, the bonus token included; null without such a step",
    ] = None
    histogram: Annotated[list[int], "entry k: draft steps with k drafts accepted"] = []


Alternatives = tuple[list[int], list[float]]  # token ids and their log-probs, best first
Numerics = Annotated[str, "the guarantee that the tokens have: strict or fast, with how it is kept"]
RolloutId = Annotated[str, "with which it is followed, fetched and deleted"]
RolloutState = Annotated[Literal["running", "done"], "whether all items have ended"]


class Choice(Struct, frozen=True, kw_only=True):
    index: Annotated[int, "which of the item's n choices, from 0"]
    token_ids: Annotated[list[int], "the output, its stop token included"]
    text: Annotated[
        str | None,
        "the output as text, without stop token or stop string; null where the model has no "
        "tokenizer",
    ]
    logprobs: Annotated[list[float], "one per token, under the distribution that was sampled from"]
    finish_reason: Annotated[
        FinishReason, "what ended it: a stop token or string, its length, or an abort"
    ]
    stop_reason: Annotated[
        int | str | None, "the stop token's id or the stop string; null for another end"
    ]
    weight_versions: Annotated[list[VersionSpan], "which weights computed which tokens"]
    seed: Annotated[int, "with which the choice can be repeated"]
    sd: Annotated[SdReport, "figures of its speculation"]
    raw_logprobs: Annotated[
        list[float] | None, "one per token, under the unprocessed distribution; where asked for"
    ] = None
    top_logprobs: Annotated[
        list[Alternatives] | None, "per token the most likely alternatives; where asked for"
    ] = None
    prompt_logprobs: Annotated[
        list[Alternatives | None] | None,
        "per prompt token its own and the most likely alternatives, null for the first; where "
        "asked for",
    ] = None


class WireError(Struct, frozen=True):
    code: Annotated[str, "the kind of error, for programs"]
    message: Annotated[str, "the value, the limit and the remedy"]
    retryable: Annotated[bool, "whether the same request may succeed later"] = False


class ItemResult(Struct, frozen=True):
    """One item's end: choices, or an error."""

    id: Annotated[str, "of the item, as the request gave it or as it was numbered"]
    choices: Annotated[list[Choice], "the item's n choices; empty where it failed"] = []
    error: Annotated[WireError | None, "why there are no choices; else null"] = None


class Usage(Struct, frozen=True):
    prompt_tokens: Annotated[int, "of all items, each prompt counted once"] = 0
    completion_tokens: Annotated[int, "of all choices"] = 0
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"] = 0


class Reply(Struct, frozen=True):
    results: Annotated[list[ItemResult], "one per item, in the order of the request"]
    usage: Annotated[Usage, "tokens of the whole batch"]
    numerics: Numerics


class Progress(Struct, frozen=True):
    items: Annotated[int, "of the batch"]
    items_ended: Annotated[int, "with a result or an error"]
    tokens: Annotated[int, "generated so far"]


class RolloutStatus(Struct, frozen=True):
    """The id and state of one rollout."""

    id: RolloutId
    status: Annotated[
        Literal["running", "done", "deleted"], "running or done; of a rollout just deleted, deleted"
    ]


class RolloutSummary(Struct, frozen=True):
    """A rollout without its prompts and results."""

    id: RolloutId
    status: RolloutState
    detached: Annotated[bool, "asked for with `detach`, else with an Idempotency-Key alone"]
    created_s: Annotated[float, "when it was started, in Unix seconds"]
    done_s: Annotated[float | None, "when its last item ended, in Unix seconds; null while it runs"]
    bytes: Annotated[int, "size of its journal"]
    progress: Annotated[Progress, "how far it is"]
    owner: Annotated[str, "the name of the key that began it; empty on a server without keys"] = ""


class RolloutList(Struct, frozen=True):
    rollouts: Annotated[list[RolloutSummary], "all that are kept, oldest first"]


class RolloutReply(Struct, frozen=True):
    """A rollout with its present results; once `status` is done, with all of them."""

    id: Annotated[str, "of the rollout"]
    status: RolloutState
    progress: Annotated[Progress, "how far it is"]
    results: Annotated[
        list[ItemResult], "of the items that have ended, in the order of the request"
    ]
    usage: Annotated[Usage, "tokens of these items"]
    numerics: Numerics


class EngineState(Struct, frozen=True):
    """State of the engine: a pause, and freed memory."""

    paused: Annotated[bool, "whether a pause holds"]
    new_requests: Annotated[
        Literal["run", "wait", "refuse"],
        "what becomes of them now: they run, wait for the end of a pause, or get a 503",
    ]
    asleep: Annotated[list[Literal["kv_cache", "weights"]], "memory that is given back"]


class AbortReply(Struct, frozen=True):
    sequences: Annotated[
        int, "open sequences that the abort ends; those of ended items do not count"
    ]


ReplicaState = Literal["joining", "catching up", "ready", "draining", "lost"]


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """One server of a fleet."""

    name: Annotated[str, "of the replica; orders name it so"]
    state: Annotated[
        ReplicaState,
        "ready: requests are placed there; catching up: it takes the committed weights first",
    ]
    asleep: Annotated[bool, "it has given its memory back until it is wanted"] = False
    address: Annotated[str, "of its link: host and port"] = ""
    url: Annotated[str, "of its own HTTP server; empty until it has joined"] = ""
    versions: Annotated[dict[str, str], "role -> version that is live there"] = {}
    running: Annotated[int, "sequences that decode there"] = 0
    waiting: Annotated[int, "sequences that wait there"] = 0
    expected_wait_s: Annotated[float, "time that a further sequence would wait there"] = 0.0
    moves: Annotated[int, "sequences that were moved away from there"] = 0
    fault: Annotated[str, "why it was last lost or refused; empty if it never was"] = ""


class FleetStatus(Struct, frozen=True):
    replicas: Annotated[list[ReplicaStatus], "by name"]


class DrafterSamples(NamedTuple):
    """Recorded sequences, the reply of `drafter_samples`."""

    content: bytes  # a segment file
    after: int  # where the next call goes on
    left: int  # sequences that come after these now


class UploadStatus(TypedDict):
    """An upload of a version by http."""

    version: str
    parts: int  # parts that were started
    bytes: int  # bytes that the server has
    total: int  # bytes that the started parts will have
    age_s: float  # since its first byte
    idle_s: float  # since its last byte


class UpdateStatus(TypedDict):
    """An open weight update: every push stays staged until its end."""

    selector: str  # the model whose weights it brings
    pushes: int  # calls that have pushed in it
    age_s: float  # since it was started
    ends_in_s: float  # the server drops it then, unless it is called


class Weights(TypedDict):
    """Live weights, those for a rollback, and open pushes. Servers of other versions may report
    less, or more.
    """

    target: str  # the target's live version
    drafter: str  # the drafter's; empty where none can be pushed
    previous: dict[str, str]  # role -> version before, which a rollback can restore
    open: dict[str, str]  # version, role and state of the open push; empty without one
    spooled: bool  # committed versions are kept for a restart
    quarantined: dict[str, str]  # role -> why nothing is generated
    groups: list[str]  # process groups that the server has joined
    sockets: str  # directory of the sockets of pushes by ipc; empty: the channel is closed
    uploads: list[UploadStatus]  # oldest first
    update: UpdateStatus | None  # the open weight update


class Token(Struct, frozen=True, kw_only=True):
    """New tokens of choice `index` of item `id` in a stream; text may arrive later than its
    tokens.
    """

    id: Annotated[str, "of the item"]
    index: Annotated[int, "which of the item's n choices, from 0"]
    token_ids: Annotated[list[int], "the new tokens"]
    text: Annotated[
        str | None,
        "the new text, which may come later than the tokens; null where the model has no tokenizer",
    ]
    logprobs: Annotated[
        list[float], "one per new token, under the distribution that was sampled from"
    ]
    top_logprobs: Annotated[
        list[Alternatives] | None, "per new token the most likely alternatives; where asked for"
    ] = None
    prompt_logprobs: Annotated[
        list[Alternatives | None] | None,
        "with the choice's first tokens, as in the choice; where asked for",
    ] = None


class Done(Struct, frozen=True):
    usage: Annotated[Usage, "tokens of the whole batch"]
    numerics: Numerics


StreamEvent = Token | ItemResult | Done
_EVENTS: dict[str, msgspec.json.Decoder[Any]] = {
    "token": msgspec.json.Decoder(Token),
    "result": msgspec.json.Decoder(ItemResult),
    "error": msgspec.json.Decoder(ItemResult),
    "done": msgspec.json.Decoder(Done),
}


class EventParser:
    """Parser of server-sent events; `feed` returns an event when a line completes one."""

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
