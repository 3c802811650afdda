"""Events from the engine: its start, the outputs of steps, the answers to commands, its failure.

They travel as msgpack, in the order in which the engine sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from tlt_server.settings.server import QuantizationName
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.records import Cycle, StepOutput, Switch

CHECKED = "check files"  # the phase after which device and files are known to be usable
DRAFTER_QUANTIZATION = "how the drafter's matrices are kept: none or fp8; tokens are the same"
MAX_OUTPUTS = 256  # in one event; on a slow core the frontend takes 2 ms to take them in


class EngineInfo(Struct, frozen=True, kw_only=True):
    """The engine's report of itself once it is ready."""

    model: Annotated[str, "the name of the served model"]
    weight_version: Annotated[str, "the target's version that is live"]
    drafter_version: Annotated[str, "empty where no drafter can be pushed"] = ""
    drafter_quantization: Annotated[QuantizationName, DRAFTER_QUANTIZATION] = "none"
    vocab_size: Annotated[int, "token ids end below it"]
    max_model_len: Annotated[int, "the longest prompt plus output, in tokens"]
    eos_token_ids: Annotated[list[int], "that end an output"]
    pages: Annotated[int, "of KV"]
    page_size: Annotated[int, "positions per page"]
    max_running: Annotated[int, "sequences that decode at once"]
    drafter: Annotated[str, "where draft tokens come from"]
    policy: Annotated[str, "who chooses each step's strategy"]
    numerics: Annotated[str, "the guarantee that the tokens have, with how it is kept"]
    fingerprint: Annotated[
        Fingerprint, "equal on servers that give the same bits, if their libraries are equal, too"
    ]
    libraries: Annotated[
        dict[str, str], "library that bits depend on -> its version; kernels: a digest of the files"
    ] = {}
    tensor_parallel: Annotated[int, "ranks that share the target"] = 1
    max_rows: Annotated[int, "prompt rows that one step processes"] = 0
    attention: Annotated[str, "the attention backend"]
    dtype: Annotated[str, "of weights and KV"]
    device: Annotated[str, "that computes: cpu or cuda"]
    gpu: Annotated[str, "the GPU's name, memory and compute capability; empty on a CPU"] = ""
    products: Annotated[
        str, "the kernel of matrix products: streaming, or portable and why; empty on a CPU"
    ] = ""
    prepared: Annotated[str, "the strategies that a step can use at once, without a delay"] = ""
    graphs: Annotated[bool, "whether steps are captured as CUDA graphs"] = False
    choices: Annotated[
        dict[str, str], "setting that was left to what is found here -> its value and why"
    ] = {}
    training_device: Annotated[
        str, "where a drafter is trained; cuda: on the GPU that computes"
    ] = "cpu"
    threads: Annotated[int, "that compute"]
    phases: Annotated[dict[str, float], "start-up phase -> seconds"]
    pid: Annotated[int, "of the engine process"] = 0
    rank_pids: Annotated[list[int], "of the ranks after the first"] = []
    adapters: Annotated[dict[str, str], "LoRA adapter that is loaded -> its version"] = {}
    spooled: Annotated[bool, "whether committed versions are kept for a restart"] = False
    stages: Annotated[
        bool, "whether pushed weights wait, verified, for their commit; else they are written live"
    ] = True
    lost: Annotated[
        dict[str, str], "role -> which committed version is not what is live, and why"
    ] = {}

    @property
    def drafters(self) -> list[str]:
        return [name for name in self.drafter.split("+") if name not in ("", "none")]


# The end of an engine process: by itself or by a signal; with an error that it reported; killed
# because it was silent; refused by the system
Ending = Literal["exited", "failed", "hung", "not_launched"]


class Ready(Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Phase(Struct, frozen=True, tag="phase"):
    """A start-up phase has ended."""

    name: Annotated[str, "of the start-up phase"]
    seconds: Annotated[float, "that it took"]
    detail: Annotated[str, "what it found"] = ""


class PhaseProgress(Struct, frozen=True, tag="phase_progress"):
    """A start-up phase has begun, or a step of it is done."""

    name: str
    done: int  # steps
    of: int  # 0: it has none that are counted


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """A sign that the loop runs, sent when nothing else was sent for a while."""


class Outputs(Struct, frozen=True, tag="outputs"):
    """The outputs of one step, or a part of them, with the gauges after it. The last part has the
    `cycle`.
    """

    outputs: list[StepOutput]
    gauges: dict[str, float]
    cycle: Cycle | None = None
    switches: list[Switch] = []  # those since the last event
    # Seconds since a sequence's tokens before, tokens now, and the sequences of which that is true.
    gaps: list[tuple[float, int, int]] = []


def of_step(
    outputs: list[StepOutput],
    gauges: dict[str, float],
    cycle: Cycle | None,
    switches: Sequence[Switch] = (),
    gaps: Sequence[tuple[float, int, int]] = (),
) -> Iterator[Outputs]:
    """Yield one step's outputs in parts, since thousands of sequences may end in one step."""
    last = max(0, len(outputs) - 1) // MAX_OUTPUTS * MAX_OUTPUTS
    for at in range(0, last, MAX_OUTPUTS):
        yield Outputs(outputs[at : at + MAX_OUTPUTS], gauges)
    yield Outputs(outputs[last:], gauges, cycle, [*switches], [*gaps])


class WeightState(Struct, frozen=True, kw_only=True):
    """The live versions, the versions for a rollback, and a push in progress."""

    target: Annotated[str, "the version that is live"]
    quantization: Annotated[
        QuantizationName,
        "how the target's linear maps are kept: none; fp8: checksums and values that are read are "
        "of effective weights, as tlt_client.quantise computes them",
    ] = "none"
    drafter: Annotated[str, "the drafter's; empty where there is none to push"] = ""
    drafter_quantization: Annotated[QuantizationName, DRAFTER_QUANTIZATION] = "none"
    previous: Annotated[dict[str, str], "role -> version before, which a rollback can restore"] = {}
    open: Annotated[
        dict[str, str], "version, role and state of a push on its way; empty without one"
    ] = {}
    spooled: Annotated[bool, "whether committed versions are kept for a restart"] = False
    quarantined: Annotated[
        dict[str, str],
        "role -> why nothing is generated: a push that wrote into the weights in use has failed",
    ] = {}
    groups: Annotated[list[str], "process groups that were joined"] = []
    adapters: Annotated[dict[str, str], "LoRA adapter that is loaded -> its version"] = {}
    sockets: Annotated[
        str, "directory of the sockets of pushes by ipc; empty: the channel is closed"
    ] = ""


class WeightReport(Struct, frozen=True, kw_only=True, tag="weight_report"):
    """The answer to one weight command."""

    id: str
    state: WeightState
    # committed, staged, gathering, unchanged, aborted, named, rolled_back, unloaded, looked,
    # joined, left; or an error's code
    result: str = ""
    error: tuple[str, str] | None = None  # (code, message)
    version: str = ""
    role: str = ""
    # tensor -> "mix64:..." of its values; with both roles, drafter names begin with "draft."
    checksums: dict[str, str] = {}
    phases: dict[str, float] = {}  # seconds
    pause_ms: float = 0.0  # time for which the commit kept the loop from stepping
    values: bytes = b""  # values of a tensor that was read: float32, row after row
    shape: list[int] = []  # shape of these values
    lagging: dict[str, str] = {}  # replica of a fleet -> why it takes part only later


class ControlReport(Struct, frozen=True, tag="control_report"):
    """The answer to one control command or policy change; it was executed unless there is an
    error.
    """

    id: str
    error: tuple[str, str] | None = None  # (code, message)
    detail: str = ""  # what a policy finds prepared


class BufferReport(Struct, frozen=True, kw_only=True, tag="buffer"):
    """The trainer process' report on its kept sequences; one line of JSON."""

    sequences: int = 0
    tokens: int = 0
    size: int = 0  # bytes
    tokens_by_version: dict[
        str, int
    ] = {}  # output tokens; versions before the newest ones: `older`
    refused: int = 0  # sequences and files that do not fit
    lost: int = 0  # times that the ring was emptied, as an entry was not whole
    disk_error: str = ""  # why sequences are in memory only
    feature_tokens: int = 0  # tokens whose features are held
    feature_size: int = 0  # bytes
    refusals: list[str] = []  # new since the last report


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot start or continue."""

    code: str
    message: str


Event = Ready | Phase | PhaseProgress | Heartbeat | Outputs | WeightReport | ControlReport | Failed
_EVENTS = msgspec.msgpack.Decoder(Event)


def decode_event(data: bytes) -> Event:
    return _EVENTS.decode(data)
