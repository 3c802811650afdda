"""Records that cross seams: requests, outputs, strategies and steps. Small, frozen, no torch.

Requests and outputs travel between frontend and engine as msgpack (msgspec), so every record here
is a `Struct`. Positions count from 0 over prompt + output; a *row* is one (request, position,
token) that the target processes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tlt_kernels.filters import Filters
from tlt_server.errors import StartupError
from tlt_server.settings.server import QuantizationName
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS

MAX_DRAFTS = 2**31 - 1


class Grammar(Struct, frozen=True, kw_only=True, gc=False):
    """The texts that an output may be, in one of three languages: a JSON schema as JSON, a regular
    expression for the whole output, or a grammar in Lark's form.

    The frontend has compiled it once, so it is known to compile.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(Filters, frozen=True, kw_only=True, gc=False):
    """The sampling of one sequence. Applied in this order: bias and bans, penalties, min_tokens,
    allowed tokens, structured outputs, temperature, filters, noise.

    The frontend validates against the server's limits; the engine trusts it.
    """

    temperature: float = 1.0  # 0 = greedy
    max_tokens: int = (
        256  # 0: the prompt is read, and scored with prompt_logprobs, and no token follows
    )
    min_tokens: int = 0  # stop tokens are masked before this many output tokens
    stop: tuple[str, ...] = ()  # matched by the frontend on the text
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False  # the frontend keeps the stop in the text
    ignore_eos: bool = False
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # no others are sampled; empty: all
    # Tokens of each; the last one is not sampled where the output ends with those before.
    bad_words: tuple[tuple[int, ...], ...] = ()
    structured_outputs: Grammar | None = None  # the output is a text of it, or the start of one
    logprobs: int = 0  # alternatives reported per token; the sampled token's own is always reported
    raw_logprobs: bool = False  # also report log-probs under the unprocessed distribution
    prompt_logprobs: int | None = None  # alternatives per prompt token; None = not reported


class DraftLimits(Struct, frozen=True, kw_only=True, gc=False):
    """The limits on one request's drafts. In a step of another drafter it takes none."""

    drafter: str = ""  # the only one that may draft; empty: any
    max_depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)] = MAX_DEPTH
    # Verify rows in a step, the root row included.
    max_rows: Annotated[int, Meta(ge=2, le=MAX_ROWS)] = MAX_ROWS

    def permits(self, drafter: str) -> bool:
        return self.drafter in ("", drafter)


NO_LIMITS = DraftLimits()


class GenerateRequest(Struct, frozen=True, kw_only=True, gc=False):
    """One sequence to generate. `n` choices are n of these with one `group_id`. Requests, samplings
    and outputs are in no cycle, so the garbage collector need not walk thousands of them.
    """

    id: str
    token_ids: list[int] | PackedIds
    sampling: Sampling
    seed: Annotated[int, Meta(ge=0)]  # unsigned 64 bit; keys the noise
    group_id: str = ""
    salt: str = ""  # separates prefix-cache tenants
    lora: str = ""  # the adapter that computes it; empty: none
    weight_version: str = ""  # the only version whose tokens the frontend takes; empty: any
    owner: str = ""  # name of the API key that asked; empty on a server without keys
    priority: int = 0  # lower values start first
    sd: bool | DraftLimits = True  # False: this request is never speculated on
    train: bool = False  # it may be recorded to train the drafter
    deadline_s: float | None = None  # time.monotonic() of this host
    begin_by_s: float | None = None  # likewise: it ends unless it has started by then
    generated: list[int] = []  # output tokens from before; the engine reports only those after them
    patient: bool = False  # outputs may come in chunks, as no client waits for single tokens

    @property
    def draft_limits(self) -> DraftLimits | None:
        """None for a request that is never speculated on."""
        if isinstance(self.sd, DraftLimits):
            return self.sd
        return NO_LIMITS if self.sd else None

    @property
    def tenant(self) -> str:
        """The identity that may share KV and text with this request: its salt, and with keys its
        owner.
        """
        return f"{self.owner}\n{self.salt}" if self.owner else self.salt


class LoadedAdapter(Struct, frozen=True):
    """A LoRA adapter that sequences can use, without its tensors."""

    name: str
    version: str
    digest: str  # names its content, scale included
    slot: int

    def version_of(self, target: str) -> str:
        """Return the version of tokens that the target with this adapter computes."""
        return adapted_version(target, self.name, self.version)


def adapted_version(target: str, name: str, version: str) -> str:
    return f"{target}+{name}@{version}"


def drafter_key(version: str, quantization: QuantizationName) -> str:
    """Return a drafter's name in records: version and quantization decide its drafts."""
    return version if quantization == "none" else f"{version}@{quantization}"


class Strategy(Struct, frozen=True, order=True):
    """One arm. `rows`: verify rows per request, the root row included; OFF is one row and no
    drafter. `budget`, if any: the draft rows of the whole batch; `rows` is then about their mean.
    """

    drafter: str = ""
    depth: int = 0
    width: int = 0
    rows: int = 1
    budget: int = 0

    def draft_rows(self, requests: int) -> int:
        """Return the draft rows of a batch of this size."""
        return self.budget or (self.rows - 1) * requests

    @property
    def name(self) -> str:
        """The spelling that `parse_strategy` reads; `off` for no speculation."""
        return f"{self.shape}x{self.rows}" if self.drafter else "off"

    @property
    def shape(self) -> str:
        """The name without the rows, which a policy may change at every step."""
        return f"{self.drafter}:{self.depth}x{self.width}" if self.drafter else "off"


OFF = Strategy()
_STRATEGY = re.compile(r"([a-z][a-z0-9_]*):(\d{1,3})x(\d{1,3})x(\d{1,4})", re.ASCII)


def parse_strategy(text: str, name: str = "sd_strategy") -> Strategy:
    """Parse a strategy such as `eagle:7x4x32`: drafter, depth, children per node, verify rows per
    request (the root row included). `name`: the field's name in errors.
    """
    match = _STRATEGY.fullmatch(text)
    if match is None:
        raise StartupError(
            f"{name} is {text[:80]!r}; it must look like drafter:DEPTHxWIDTHxROWS, for example "
            "eagle:7x4x32"
        )
    depth, width, rows = (int(number) for number in match.groups()[1:])
    if depth < 1 or width < 1 or rows < 2:
        raise StartupError(
            f"{name} is {text!r}; depth and width must be at least 1 and rows at least 2 (the root "
            "and one draft)"
        )
    return Strategy(drafter=match[1], depth=depth, width=width, rows=rows)


class Pin(Struct, frozen=True):
    """A strategy for batches of these sizes, both bounds included."""

    first: int
    last: int
    strategy: Strategy


class Arms(Struct, frozen=True):
    """The strategies that a policy may choose from in addition to OFF: all of these drafters, and
    these.

    A policy that decides the rows by itself uses the depths and widths of the latter.
    """

    drafters: tuple[str, ...] = ()
    strategies: tuple[Strategy, ...] = ()

    def permit(self, drafter: str, depth: int, width: int) -> bool:
        shapes = {(each.drafter, each.depth, each.width) for each in self.strategies}
        return drafter in self.drafters or (drafter, depth, width) in shapes


SwitchReason = Literal[
    "start",
    "policy",
    "pin",
    "weights",
    "prompts",
    "batch grew",
    "batch shrank",
    "context",
    "acceptance",
]


class Switch(Struct, frozen=True):
    """A step with a different strategy from the previous steps."""

    time_s: Annotated[float, "when, in Unix seconds"]
    strategy: Annotated[str, "the strategy from then on"]
    before: Annotated[str, "the one before; empty for the first"]
    reason: Annotated[
        SwitchReason, "the change that led to it; acceptance: what is known of drafts and times"
    ]
    batch: Annotated[int, "sequences that decoded then"]


class StepContext(Struct, frozen=True):
    """A policy's input before a step."""

    decoding: int  # requests that sample in this step
    prefill_rows: int  # prompt rows that share the step
    mean_context: float
    speculable: int  # requests that allow speculation
    # Speculable requests that only one drafter may draft for, by its name.
    bound: dict[str, int] = {}
    deepest: int = MAX_DEPTH  # largest depth that these requests permit
    most_drafts: int = MAX_DRAFTS  # draft rows that they permit together
    chunks: int = 0  # prompts that share the step
    filtered: bool = False  # top-k, top-p or min-p for some request
    edited: bool = False  # logits edited for some request
    structured: bool = False  # masks of some request: of a structured output or bad words
    adapted: bool = False  # an adapter for some request

    def taking(self, drafter: str) -> int:
        """Return the number of requests that take drafts of this drafter."""
        return self.speculable - sum(self.bound.values()) + self.bound.get(drafter, 0)


class Cycle(Struct, frozen=True, kw_only=True):
    """A policy's input after a step."""

    context: StepContext
    strategy: Strategy
    rows: int  # rows the target processed, padding included
    emitted: int = 0  # tokens given to requests, with bonus tokens, without those after a stop
    accepted: tuple[int, ...]  # draft tokens accepted, per decoding request
    drafted: int  # draft rows verified
    step_s: float = 0.0  # wall time since the step before ended, or since this one after idling
    predicted_s: float = 0.0  # what was expected of `step_s`; 0: nothing


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Alternatives of one position: token ids and their log-probs, best first. The garbage
    collector ignores tuples of numbers; 50,000 lists would hold the frontend's loop for 60 ms.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


CHUNK_TOKENS, CHUNK_S = 64, 0.25  # a chunk of outputs goes out with as many, or after that time


class StepOutput(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The output of one step for one request. The last one has the `finish_reason`; all of them
    together are the whole output.
    """

    id: str
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None = None
    top_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first output
    cached_tokens: int = 0  # prompt tokens served by the prefix index; with the first output
    queued_s: float = 0.0  # from its arrival at the engine until its start; with the first output
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the token id or string that stopped it
    error: tuple[str, str] | None = None  # (code, message) when finish_reason is "error"
    weight_version: str = ""  # the version that computed the tokens
    drafted: int = 0  # draft rows verified
    accepted: int = 0  # accepted draft rows, also those that a stop cut off
    steps: int = 1  # with tokens, in a chunk
    accepted_each: list[int] = []  # in a chunk: accepted draft rows of each step with drafts
    draft_tokens: int = 0  # in a chunk: tokens of these steps


def last_output(id: str, finish_reason: str, error: tuple[str, str] | None = None) -> StepOutput:
    """Return the output that ends a sequence without further tokens."""
    return StepOutput(id=id, token_ids=[], logprobs=[], finish_reason=finish_reason, error=error)


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)
