"""What crosses seams: small frozen records, no torch.

Requests and outputs travel between frontend and engine as msgpack (msgspec), so every record here
is a `Struct`. Positions count from 0 over prompt + output; a *row* is one (request, position,
token) that the target processes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tlt_server.errors import StartupError

MAX_SEED = 2**64 - 1


class Sampling(Struct, frozen=True, kw_only=True):
    """How one sequence is sampled. Applied in this order: bias, penalties, min_tokens, temperature,
    min_p, top_k, top_p, noise.

    The frontend validates against the server's limits; the engine trusts it.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = (
        256  # 0: the prompt is read, and scored with prompt_logprobs, and no token follows
    )
    min_tokens: int = 0  # stop tokens are masked before this many output tokens
    stop: tuple[str, ...] = ()  # matched by the frontend on the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    logprobs: int = 0  # alternatives reported per token; the sampled token's own is always reported
    raw_logprobs: bool = False  # also report log-probs under the unprocessed distribution
    prompt_logprobs: int | None = None  # alternatives per prompt token; None = not reported


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One sequence to generate. `n` choices are n of these with one `group_id`."""

    id: str
    token_ids: list[int]
    sampling: Sampling
    seed: Annotated[int, Meta(ge=0)]  # unsigned 64 bit; keys the noise
    group_id: str = ""
    salt: str = ""  # separates prefix-cache tenants
    sd: bool = True  # False: this request is never speculated on
    deadline_s: float | None = None  # time.monotonic() of this host
    begin_by_s: float | None = None  # likewise: it ends unless it has begun by then
    generated: list[
        int
    ] = []  # output tokens that it has already; the engine goes on behind them and reports only new ones


class Strategy(Struct, frozen=True, order=True):
    """One arm. `rows` is verify rows per request, the root row included: OFF is one row and no
    drafter.
    """

    drafter: str = ""
    depth: int = 0
    width: int = 0
    rows: int = 1

    @property
    def name(self) -> str:
        """As `parse_strategy` reads it; `off` for no speculation."""
        return f"{self.drafter}:{self.depth}x{self.width}x{self.rows}" if self.drafter else "off"


OFF = Strategy()
_STRATEGY = re.compile(r"([a-z][a-z0-9_]*):(\d{1,3})x(\d{1,3})x(\d{1,4})", re.ASCII)


def parse_strategy(text: str, name: str = "sd_strategy") -> Strategy:
    """Read a strategy such as `eagle:7x4x32`: drafter, depth, children per node, verify rows per
    request (the root row included). `name` is the field that the error message names.
    """
    match = _STRATEGY.fullmatch(text)
    if match is None:
        raise StartupError(
            f"{name} is {text[:80]!r}; it must look like drafter:DEPTHxWIDTHxROWS, for example eagle:7x4x32"
        )
    depth, width, rows = (int(number) for number in match.groups()[1:])
    if depth < 1 or width < 1 or rows < 2:
        raise StartupError(
            f"{name} is {text!r}; depth and width must be at least 1 and rows at least 2 (the root and one draft)"
        )
    return Strategy(drafter=match[1], depth=depth, width=width, rows=rows)


class StepContext(Struct, frozen=True):
    """What a policy sees before a step."""

    decoding: int  # requests that sample in this step
    prefill_rows: int  # prompt rows that share the step
    mean_context: float
    speculable: int  # requests that allow speculation


class Cycle(Struct, frozen=True, kw_only=True):
    """What a policy sees after a step."""

    context: StepContext
    strategy: Strategy
    rows: int  # rows the target processed
    emitted: int = 0  # tokens given to requests, bonus tokens included, surplus behind a stop not
    accepted: tuple[int, ...]  # draft tokens accepted, per decoding request
    drafted: int  # draft rows verified
    step_s: float = (
        0.0  # wall time since the previous step ended, or since this one began after idling
    )


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Alternatives of one position: token ids and their log-probs, best first."""

    token_ids: list[int]
    logprobs: list[float]


class StepOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave to one request; the last one carries `finish_reason`. Whoever holds all of
    them has all of the request.
    """

    id: str
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None = None
    top_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first output
    cached_tokens: int = 0  # prompt tokens served by the prefix index; with the first output
    queued_s: float = (
        0.0  # from its arrival at the engine until it was begun; with the first output
    )
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the token id or string that stopped it
    error: tuple[str, str] | None = None  # (code, message) when finish_reason is "error"
    weight_version: str = ""  # that computed the tokens
    drafted: int = 0  # draft rows verified
    accepted: int = 0  # of them, also those that a stop cut off


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it is ready."""

    model: Annotated[str, Meta(description="the name of the served model")]
    weight_version: Annotated[str, Meta(description="the target's version that is live")]
    drafter_version: Annotated[str, Meta(description="empty where no drafter can be pushed")] = ""
    vocab_size: Annotated[int, Meta(description="token ids end below it")]
    max_model_len: Annotated[int, Meta(description="the longest prompt plus output, in tokens")]
    eos_token_ids: Annotated[list[int], Meta(description="that end an output")]
    pages: Annotated[int, Meta(description="of KV")]
    page_size: Annotated[int, Meta(description="positions per page")]
    max_running: Annotated[int, Meta(description="sequences that decode at once")]
    drafter: Annotated[str, Meta(description="where draft tokens come from")]
    policy: Annotated[str, Meta(description="who chooses each step's strategy")]
    numerics: Annotated[
        str, Meta(description="the guarantee that the tokens have, with how it is kept")
    ]
    max_rows: Annotated[int, Meta(description="prompt rows that one step processes")] = 0
    attention: Annotated[str, Meta(description="the attention backend")]
    dtype: Annotated[str, Meta(description="of weights and KV")]
    device: Annotated[str, Meta(description="that computes: cpu or cuda")]
    gpu: Annotated[
        str, Meta(description="the GPU's name, memory and compute capability; empty on a CPU")
    ] = ""
    products: Annotated[
        str,
        Meta(
            description="the kernel of matrix products: streaming, or portable and why; empty on a CPU"
        ),
    ] = ""
    graphs: Annotated[bool, Meta(description="whether steps are captured as CUDA graphs")] = False
    choices: Annotated[
        dict[str, str],
        Meta(description="setting that was left to what is found here -> its value and why"),
    ] = {}
    threads: Annotated[int, Meta(description="that compute")]
    phases: Annotated[dict[str, float], Meta(description="start-up phase -> seconds")]
    pid: Annotated[int, Meta(description="of the engine process")] = 0
    spooled: Annotated[
        bool, Meta(description="whether committed versions are kept for a restart")
    ] = False
    lost: Annotated[
        dict[str, str],
        Meta(description="role -> which committed version is not what is live, and why"),
    ] = {}


class Submit(Struct, frozen=True, tag="submit"):
    """A batch; all its requests are admitted or none."""

    requests: list[GenerateRequest]


class Abort(Struct, frozen=True, tag="abort"):
    ids: list[str]
    finish_reason: str = "abort"
    all: bool = False  # whatever `ids` says


InFlight = Literal["continue", "recompute", "abort", "drain"]
Memory = Literal["weights", "kv_cache"]


class Pause(Struct, frozen=True, tag="pause"):
    """No further step until `Resume`; what is submitted meanwhile waits. `in_flight` says what
    becomes of what came before.

    `continue` stays as it is, its KV included; `recompute` gives its KV back and goes on from its
    tokens; `abort` ends with what it has; `drain` ends first, and only then the pause begins and is
    answered. Every command on this list is answered by one `ControlReport`.
    """

    id: str
    in_flight: InFlight = "continue"
    clear_cache: bool = False  # forget cached prefixes too, once the pause has begun


class Resume(Struct, frozen=True, tag="resume"):
    id: str


class Sleep(Struct, frozen=True, tag="sleep"):
    """No further step, and this memory is given back, until `WakeUp`. `in_flight` is as for
    `Pause`, but nothing keeps its KV: what does not end goes on from its tokens.
    """

    id: str
    memory: list[Memory]
    in_flight: InFlight = "recompute"


class WakeUp(Struct, frozen=True, tag="wake_up"):
    """Take this memory again. Weights come back bit for bit; steps go on once nothing sleeps."""

    id: str
    memory: list[Memory]


class ClearCache(Struct, frozen=True, tag="clear_cache"):
    """Forget every cached prefix: no later request is served by KV of before. `unless_held`: if a
    sequence holds KV, a `Conflict` instead; those that only wait hold none.
    """

    id: str
    unless_held: bool = False


class SetPolicy(Struct, frozen=True, tag="set_policy"):
    """Replace the policy in force, between steps; `strategy` is for `fixed`. Takes effect without
    flushing KV.
    """

    policy: str
    strategy: Strategy | None = None


class Stop(Struct, frozen=True, tag="stop"):
    """Finish what runs (drain) or abort it, then exit."""

    drain: bool = True


Ending = Literal[
    "exited", "failed", "hung"
]  # of an engine process: by itself or a signal; with its own last word; killed as it was silent
Role = Literal["target", "drafter"]
PushRole = Role | Literal["all"]


class TensorEntry(Struct, frozen=True, kw_only=True):
    """What a manifest says of one tensor; fields left empty are not compared. In role `all`,
    drafter names begin with `draft.`.
    """

    name: str
    dtype: str = ""  # as torch names it: "bfloat16"
    shape: list[int] | None = None
    checksum: str = ""  # "mix64:<hex>" of the tensor's values, or "sha256:<hex>" or "xxh3:<hex>" over its bytes as they are pushed


class Manifest(Struct, frozen=True, kw_only=True):
    """One push of weights. `in_flight` says what becomes of requests that run when the target
    changes.
    """

    role: PushRole = "target"
    version: str = ""  # empty: the directory's name and the content's digest
    channel: str = "disk"  # a name of `tlt_client.channels.CHANNELS`
    path: str = ""  # directory, absolute or below the weight root; by http the upload's; by ipc the name of a socket
    drafter_path: str = ""  # by disk with role `all`: the drafter's directory
    tensors: list[
        TensorEntry
    ] = []  # empty: everything the model has, whatever its bytes; by broadcast and ipc those that come, in order
    group: str = ""  # by broadcast: that brings them
    packed: bool = True  # by broadcast: in buckets of raw bytes; False: one by one
    bucket_bytes: int = 2**30  # a bucket closes after the tensor that takes it over this
    partial: bool = False  # `tensors` are some of those that come; the push goes on with further manifests until none is missing
    in_flight: InFlight = "continue"
    commit: bool = True  # False: stay staged until a commit is asked for
    session: str = ""  # id of the session that it belongs to

    @property
    def roles(self) -> tuple[str, ...]:
        return ("target", "drafter") if self.role == "all" else (self.role,)


class PushWeights(Struct, frozen=True, tag="push_weights"):
    """Stage, verify and (unless the manifest says otherwise) commit. Every weight command is
    answered by one `WeightReport` of its id.
    """

    id: str
    manifest: Manifest


class CommitWeights(Struct, frozen=True, tag="commit_weights"):
    """Make the staged push of `version`, or of a session, live, as version `name` where that is
    given.
    """

    id: str
    version: str = ""
    name: str = ""
    session: str = ""


class NameWeights(Struct, frozen=True, tag="name_weights"):
    """Call the target's weights that are live `version` from now on; their content stays.
    `Conflict` where they are not `of`, if given.
    """

    id: str
    version: str
    of: str = ""


class ReadWeights(Struct, frozen=True, tag="read_weights"):
    """The first `rows` rows of a live tensor. Drafter names begin with `draft.`. `Conflict` while
    the weights change.
    """

    id: str
    name: str
    rows: int


class AbortWeights(Struct, frozen=True, tag="abort_weights"):
    """End the push of `version`, or of a session; without either the one on its way, whatever it is
    called.
    """

    id: str
    version: str = ""
    session: str = ""


class RollbackWeights(Struct, frozen=True, tag="rollback_weights"):
    """Make the version before the last commit live again. With `to`, a repeated command finds it
    live and succeeds.
    """

    id: str
    to: str = ""
    in_flight: InFlight = "continue"


class LookAtWeights(Struct, frozen=True, tag="look_at_weights"):
    id: str
    checksums: bool = False


class JoinGroup(Struct, frozen=True, tag="join_group"):
    """Become a member of a process group whose rank 0, a trainer, hosts the store. A group of that
    name is left first.
    """

    id: str
    name: str
    backend: str  # gloo | nccl
    master_address: str
    master_port: int
    rank: int
    world_size: int
    prefixed: bool = False  # keys of the store begin with the group's name
    unique_id: bytes = b""  # of NCCL; then there is no store


class LeaveGroup(Struct, frozen=True, tag="leave_group"):
    """`Conflict` while a push takes what comes through it; `out_of_step`: then once it has, as more
    comes that nobody takes.
    """

    id: str
    name: str
    out_of_step: bool = False


WeightCommand = (
    PushWeights
    | CommitWeights
    | AbortWeights
    | NameWeights
    | ReadWeights
    | RollbackWeights
    | LookAtWeights
    | JoinGroup
    | LeaveGroup
)
ControlCommand = Pause | Resume | Sleep | WakeUp | ClearCache
Command = Submit | Abort | SetPolicy | Stop | ControlCommand | WeightCommand


class Ready(Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Phase(Struct, frozen=True, tag="phase"):
    """A start-up phase has ended."""

    name: Annotated[str, Meta(description="of the start-up phase")]
    seconds: Annotated[float, Meta(description="that it took")]
    detail: Annotated[str, Meta(description="what it found")] = ""


class PhaseProgress(Struct, frozen=True, tag="phase_progress"):
    """A start-up phase that takes long goes on."""

    name: str
    done: int  # steps
    of: int


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """The loop goes round and has had nothing else to say for a while."""


class Outputs(Struct, frozen=True, tag="outputs"):
    """Everything one step produced, and the gauges after it."""

    outputs: list[StepOutput]
    gauges: dict[str, float]
    cycle: Cycle | None = None


class WeightState(Struct, frozen=True, kw_only=True):
    """What is live, what could be rolled back to, what is on its way."""

    target: Annotated[str, Meta(description="the version that is live")]
    drafter: Annotated[
        str, Meta(description="the drafter's; empty where there is none to push")
    ] = ""
    previous: Annotated[
        dict[str, str], Meta(description="role -> version before, which a rollback can restore")
    ] = {}
    open: Annotated[
        dict[str, str],
        Meta(description="version, role and state of a push on its way; empty without one"),
    ] = {}
    spooled: Annotated[
        bool, Meta(description="whether committed versions are kept for a restart")
    ] = False
    quarantined: Annotated[
        dict[str, str],
        Meta(
            description="role -> why nothing is generated: a push that wrote into the weights in use has failed"
        ),
    ] = {}
    groups: Annotated[list[str], Meta(description="process groups that were joined")] = []
    sockets: Annotated[
        str,
        Meta(description="directory of the sockets of pushes by ipc; empty: the channel is closed"),
    ] = ""


class WeightReport(Struct, frozen=True, kw_only=True, tag="weight_report"):
    """The answer to one weight command."""

    id: str
    state: WeightState
    result: str = ""  # committed, staged, gathering, unchanged, aborted, named, rolled_back, looked, joined, left; or an error's code
    error: tuple[str, str] | None = None  # (code, message)
    version: str = ""
    role: str = ""
    checksums: dict[
        str, str
    ] = {}  # tensor -> "mix64:..." of its values; drafter names begin with "draft." where both are meant
    phases: dict[str, float] = {}  # seconds
    pause_ms: float = 0.0  # for which the commit kept the loop from stepping
    values: bytes = b""  # of a tensor that was read: float32, row after row
    shape: list[int] = []  # and how many


class ControlReport(Struct, frozen=True, tag="control_report"):
    """The answer to one control command: what it asks for is done, unless there is an error."""

    id: str
    error: tuple[str, str] | None = None  # (code, message)


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot start or go on."""

    code: str
    message: str


Event = Ready | Phase | PhaseProgress | Heartbeat | Outputs | WeightReport | ControlReport | Failed


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


_COMMANDS = msgspec.msgpack.Decoder(Command)
_EVENTS = msgspec.msgpack.Decoder(Event)


def decode_command(data: bytes) -> Command:
    return _COMMANDS.decode(data)


def decode_event(data: bytes) -> Event:
    return _EVENTS.decode(data)
