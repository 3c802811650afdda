"""Commands to the engine from a frontend or a benchmark.

They travel as msgpack and keep their order. Every `ControlCommand` is answered by one
`ControlReport` of its id, every `WeightCommand` by one `WeightReport`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tlt_server.wire.records import Arms, GenerateRequest, Pin, Strategy


class Submit(Struct, frozen=True, tag="submit"):
    """A batch; all its requests are admitted or none."""

    requests: list[GenerateRequest]


class Abort(Struct, frozen=True, tag="abort"):
    ids: list[str]
    finish_reason: str = "abort"
    all: bool = False  # True: every sequence, and `ids` does not count


InFlight = Literal["continue", "recompute", "abort", "drain"]
Memory = Literal["weights", "kv_cache"]


class Pause(Struct, frozen=True, tag="pause"):
    """Run no further step until `Resume`; new requests wait. `in_flight` sets the fate of started
    requests.

    `continue` keeps them with their KV; `recompute` releases their KV, and they continue from their
    tokens; `abort` ends them with their current tokens; `drain` lets them end first, and only then
    the pause starts and is answered.
    """

    id: str
    in_flight: InFlight = "continue"
    clear_cache: bool = False  # forget cached prefixes too, once the pause has started


class Resume(Struct, frozen=True, tag="resume"):
    id: str


class Sleep(Struct, frozen=True, tag="sleep"):
    """Run no further step and free this memory until `WakeUp`. `in_flight` is as for `Pause`, but
    no sequence keeps its KV: the surviving ones continue from their tokens.
    """

    id: str
    memory: list[Memory]
    in_flight: InFlight = "recompute"


class WakeUp(Struct, frozen=True, tag="wake_up"):
    """Restore this memory, with bit-identical weights; steps resume once nothing sleeps."""

    id: str
    memory: list[Memory]


class ClearCache(Struct, frozen=True, tag="clear_cache"):
    """Drop every cached prefix, so that no later request uses earlier KV. `unless_held`: `Conflict`
    instead if a sequence holds KV; waiting sequences hold none.
    """

    id: str
    unless_held: bool = False


class SetPolicy(Struct, frozen=True, tag="set_policy"):
    """Replace the active policy, its arms and the pins, between steps; `strategy` is for `fixed`.
    It takes effect, without flushing KV or learned statistics, once the kernels of its strategies
    are prepared. With an `id` it is answered by one `ControlReport`, when it takes effect or is
    refused.
    """

    policy: str
    strategy: Strategy | None = None
    arms: Arms | None = None  # None: all
    pins: tuple[Pin, ...] = ()
    id: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy} with {self.strategy.name}" if self.strategy else self.policy


MAX_TEXTS, MAX_TEXT_BYTES = 64, 2**19  # limits of `Recompute`
Text = Annotated[bytes, Meta(min_length=8, max_length=MAX_TEXT_BYTES)]


class Recompute(Struct, frozen=True, tag="recompute"):
    """Compute the states of these texts in idle time, in place of earlier requested texts. Each
    goes to the trainer as if a sequence with these tokens had ended, under the weight version live
    at that time.
    """

    texts: Annotated[list[Text], Meta(max_length=MAX_TEXTS)]  # int32 token ids


class Stop(Struct, frozen=True, tag="stop"):
    """Finish the running requests (drain) or abort them, then exit."""

    drain: bool = True


Role = Literal["target", "drafter"]
PushRole = Role | Literal["all", "adapter"]


class TensorEntry(Struct, frozen=True, kw_only=True):
    """A manifest's description of one tensor; empty fields are not compared. In role `all`, drafter
    names begin with `draft.`.
    """

    name: str
    dtype: str = ""  # as torch names it: "bfloat16"
    shape: list[int] | None = None
    # "mix64:<hex>" of the tensor's values, or "sha256:<hex>" or "xxh3:<hex>" over its pushed bytes
    checksum: str = ""


class Manifest(Struct, frozen=True, kw_only=True):
    """One push of weights. `in_flight` sets the fate of running requests when the target
    changes.
    """

    role: PushRole = "target"
    version: str = ""  # empty: the directory's name and the content's digest
    # the version is a label (`labels.py`): other content of that name is no conflict
    labelled: bool = False
    channel: str = "disk"  # a name of `tlt_client.channels.CHANNELS`
    # disk: a directory, absolute or below the weight root; http: the upload's; ipc: a socket's name
    # peer: addresses of servers that have the files, with spaces between
    path: str = ""
    key: str = ""  # by peer: the API key that these servers ask for
    digest: str = ""  # by peer: the only content that is taken, see `digests`; empty: any
    drafter_path: str = ""  # by disk with role `all`: the drafter's directory
    # empty: everything that the model has, with any bytes; by broadcast and ipc: in order of
    # arrival
    tensors: list[TensorEntry] = []
    group: str = ""  # by broadcast: the group that brings the tensors
    packed: bool = True  # by broadcast: in buckets of raw bytes; False: one by one
    bucket_bytes: int = 2**30  # a bucket closes after the tensor that takes it over this
    # `tensors` are only some; the push continues with further manifests until none is missing
    partial: bool = False
    in_flight: InFlight = "continue"
    commit: bool = True  # False: stay staged until a commit is asked for
    session: str = ""  # id of the session that it belongs to
    # version of the target that must be live: a drafter was trained for it; empty: any
    of: str = ""
    adapter: str = ""  # role adapter: its name
    # fields of its adapter_config.json, where the channel brings no such file
    adapter_config: dict[str, Any] = {}

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
    """Make the staged push of `version`, or of a session, live, under the label `name` if given."""

    id: str
    version: str = ""
    name: str = ""
    session: str = ""


class NameWeights(Struct, frozen=True, tag="name_weights"):
    """Rename the target's live version to the label `version`; its content stays. `Conflict` if
    `of` is given and is not the live version.
    """

    id: str
    version: str
    of: str = ""


class ReadWeights(Struct, frozen=True, tag="read_weights"):
    """Read the first `rows` rows of a live tensor. Drafter names begin with `draft.`. `Conflict`
    while the weights change.
    """

    id: str
    name: str
    rows: int


class HandOver(Struct, frozen=True, tag="hand_over"):
    """Write the live weights for a drafter's training into a new directory. `drafter`: the
    directory with the active drafter's config.json.
    """

    id: str
    directory: str
    drafter: str


class AbortWeights(Struct, frozen=True, tag="abort_weights"):
    """End the push of `version`, or of a session; without either, the push in progress."""

    id: str
    version: str = ""
    session: str = ""


class RollbackWeights(Struct, frozen=True, tag="rollback_weights"):
    """Undo the last push. With `to`, make that version live: a repeated command finds it live and
    succeeds. With `role`, the other role stays, even if its previous version has the same name.
    """

    id: str
    to: str = ""
    in_flight: InFlight = "continue"
    role: Role | None = None


class UnloadAdapter(Struct, frozen=True, tag="unload_adapter"):
    """Refuse new requests for an adapter, and free its slot once its running requests have ended:
    `drain` waits for them, `abort` ends them.
    """

    id: str
    name: str
    in_flight: Literal["drain", "abort"] = "drain"


class LookAtWeights(Struct, frozen=True, tag="look_at_weights"):
    id: str
    checksums: bool = False


class JoinGroup(Struct, frozen=True, tag="join_group"):
    """Join a process group whose rank 0, a trainer, hosts the store. First leave a group of the
    same name.
    """

    id: str
    name: str
    backend: str  # gloo | nccl
    master_address: str
    master_port: int
    rank: int
    world_size: int
    prefixed: bool = False  # keys of the store begin with the group's name
    unique_id: bytes = b""  # NCCL's id; then there is no store


class LeaveGroup(Struct, frozen=True, tag="leave_group"):
    """Leave a group. `Conflict` while a push receives tensors through it. `out_of_step`: more
    tensors will be sent than the push takes, so leave the group once the push has ended.
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
    | HandOver
    | RollbackWeights
    | UnloadAdapter
    | LookAtWeights
    | JoinGroup
    | LeaveGroup
)
ControlCommand = Pause | Resume | Sleep | WakeUp | ClearCache
Command = Submit | Abort | SetPolicy | Recompute | Stop | ControlCommand | WeightCommand
_COMMANDS = msgspec.msgpack.Decoder(Command)


def decode_command(data: bytes) -> Command:
    return _COMMANDS.decode(data)
