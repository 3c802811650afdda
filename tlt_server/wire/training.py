"""Messages between the frontend and the trainer process, one line of JSON each. The first one is
the trainer's settings.

The trainer reports its data and work, requests the active weights and offers drafters; the frontend
sends the active versions, hands weights over, and forwards an operator's orders.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct

from tlt_server.settings.server import QuantizationName
from tlt_server.wire.commands import Recompute
from tlt_server.wire.events import BufferReport


class TrainerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    ring: str
    model: str
    directory: str  # for segment files; empty: memory only
    tokens: int
    bytes: int
    parent: int  # process that started this one; the trainer ends with it
    feature_ring: str = ""  # empty: no features are captured
    feature_bytes: int = 0
    feature_staleness: int = 0  # versions
    activity: str = ""  # the word that tells of requests; empty: nothing is trained
    work: str = ""  # directory for candidates, of which the engine takes them
    checkpoints: str = ""
    memory: int = 0  # bytes to train in; 0: what the longest packs need
    numerics: str = "strict"  # the engine's
    threads: int = 1
    drafter: str = ""  # the directory the server was started with
    form: str = ""  # file for a `kept.DrafterForm`; empty: the quantization is settled
    shares: bool = False  # it runs on the engine's GPU while the engine does


class TrainerState(StrEnum):
    IDLE = "idle"  # waits for sequences, or for an idle engine
    TRAINING = "training"
    PARKING = "parking"  # work has come, and a segment ends
    PARKED = "parked"  # a half-done step is kept until the engine is idle again
    EVALUATING = "evaluating"  # replays a candidate
    ADOPTING = "adopting"  # a candidate is being pushed
    PAUSED = "paused"  # until an order
    FAILED = "failed"  # cannot train this drafter


class Judged(Struct, frozen=True, kw_only=True):
    """The replay of one candidate against the active drafter."""

    candidate: int  # counted from 1 over the run
    version: str = ""  # under which it is pushed
    target_version: str
    drafter_version: str  # the active drafter
    outcome: str  # adopted, offered, or why not
    groups: int = 0  # held-out prompts
    gain: float = 0.0  # mean of (before - after) / max(before, after), in cycles
    gain_low: float = -1.0  # interval that holds at all times at once
    gain_high: float = 1.0
    accept_length: float = 0.0  # the candidate's, in tokens per cycle
    accept_length_before: float = 0.0
    ms_per_cycle: float | None = None  # for a sequence alone; None: not known
    ms_per_cycle_before: float | None = None
    ms_per_token: float | None = None
    ms_per_token_before: float | None = None
    accepted_at_depth: list[float] = []  # share of cycles, from depth 1 on


class Facts(Struct, kw_only=True):
    """Counts of the trainer's work since its process started."""

    steps: int = 0  # optimizer steps, over restarts too
    rounds: int = 0  # likewise
    tokens: int = 0  # trained on
    recomputed_tokens: int = 0  # those whose features were computed again
    loss: float | None = None
    loss_at_depth: list[float | None] = []  # by unrolled step; None: not finite
    undone_steps: int = 0  # as loss or gradient was not finite
    without_features: int = 0  # drawn sequences without features of the active weights
    compared_cycles: int = 0  # by the self-check
    different_cycles: int = 0
    memory_bytes: int = 0
    micro_batch: int = 0  # slots of a pack
    checkpoints: int = 0  # written
    checkpoint_stall_ms: float = 0.0  # in which the last one kept the training waiting
    checkpoint_error: str = ""


class SpotReport(Facts, kw_only=True, tag="spot"):
    """State and counts of the trainer."""

    state: TrainerState = TrainerState.IDLE
    reason: str = ""  # for its state, where that is not obvious
    held: bool = False  # whether it is paused by the order `hold`
    answered: int = 0  # number of the last order that was carried out
    slept: int = 0  # number of the last sleep for which memory was given back
    trained_on: str = ""  # the target's version
    interval_tokens: int = 0  # output tokens to record before the next round
    recorded_tokens: int = 0  # those since the last round
    quiet_s: float = 0.0  # for which the engine must be idle
    candidate: Judged | None = None  # the last one
    adopted: int = 0
    refused: dict[str, int] = {}  # reason -> candidates
    parkings: int = 0
    parking_ms: list[float] = []  # those since the last report, from the request on


def candidate_directory(number: int | str) -> str:
    """Return the name of a candidate's directory, below the trainer's own; "*" matches all."""
    return f"candidate-{number}"


def version_of(target: str, number: int, digest: str) -> str:
    """Return the version of a drafter that was trained for a version of the target."""
    return f"drafter-{target[:64]}-{number}-{digest}"


def trained_for(version: str) -> str | None:
    """Return the first 64 characters of the target's version that a drafter was trained for; None
    if no trainer named this version.
    """
    found = re.fullmatch(r"drafter-(.*)-\d+-[0-9a-f]{8}", version, re.DOTALL)
    return found[1] if found else None


class WeightsWanted(Struct, frozen=True, tag="weights_wanted"):
    """The trainer requests the active weights."""


class Offer(Struct, frozen=True, kw_only=True, tag="offer"):
    """A candidate that was proven better, for a push."""

    directory: str
    version: str
    target_version: str  # the only one that it may be adopted on


class InForce(Struct, frozen=True, tag="in_force"):
    """The versions that are live."""

    target: str
    drafter: str
    quantization: QuantizationName = "none"  # the drafter's


class HandedOver(Struct, frozen=True, kw_only=True, tag="handed_over"):
    """Active weights, in a directory that the trainer removes; or the reason why there are none."""

    directory: str = ""
    target: str = ""
    drafter: str = ""
    quantization: QuantizationName = "none"  # in which the engine drafts
    device: str = "cpu"  # to train on: cpu, cuda (the engine's GPU), or another one by its number
    leaves: int = 1  # slices of the engine's long sums
    longest: int = 0  # tokens of the longest sequence that it computes
    error: str = ""


class Verdict(Struct, frozen=True, kw_only=True, tag="verdict"):
    """The end of an offer. `refused`: a word for counting; empty: adopted."""

    version: str
    refused: str = ""
    error: str = ""


NO_DATA = "no_data"  # a round had nothing to train on or to judge with
MAX_PAUSE_S = 86400  # the longest pause that ends by itself
Do = Literal["train", "pause", "resume", "hold", "release"]


class Order(Struct, frozen=True, kw_only=True, tag="order"):
    """`hold` is a pause that `release` ends, too; other pauses end by `resume` alone."""

    number: int
    do: Do


FromTrainer = BufferReport | SpotReport | WeightsWanted | Offer | Recompute
ToTrainer = InForce | HandedOver | Verdict | Order
_FROM, _TO = msgspec.json.Decoder(FromTrainer), msgspec.json.Decoder(ToTrainer)


def read_from_trainer(line: bytes) -> FromTrainer:
    """Parse a line; `ValueError` if it is not a message."""
    return _FROM.decode(line)


def read_to_trainer(line: bytes) -> ToTrainer:
    """Parse a line; `ValueError` if it is not a message."""
    return _TO.decode(line)


def line_of(message: FromTrainer | ToTrainer) -> bytes:
    return msgspec.json.encode(message) + b"\n"
