"""Replies of `/drafter`: the served drafters, the recorded sequences, and the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from tlt_server.frontend.link.trainer import ProcessPhase, TrainerLink
from tlt_server.wire.training import Judged


class ServedDrafter(Struct, frozen=True, kw_only=True):
    """A loaded drafter, with its recent acceptance."""

    name: Annotated[str, "as strategies name it"]
    architecture: Annotated[
        str | None, "of its network, as its config.json says; null: it has no network"
    ]
    weight_version: Annotated[str | None, "version of its weights; null: it has no network"]
    trained_for: Annotated[
        str | None,
        "the target's version, or its first 64 characters, that a trainer made these weights for; "
        "null: they are of no trainer",
    ]
    resting: Annotated[
        bool, "whether it drafts nothing, as a change of weights collapsed acceptance"
    ]
    steps: Annotated[
        int,
        "steps that the next figures are of: the last ones in which all requests took its drafts",
    ]
    accept_length: Annotated[
        float | None, "mean tokens per request and such step; null: there is no such step"
    ]
    accepted_at_depth: Annotated[
        list[float],
        "share of requests whose first 1, 2, ... drafts were accepted, of the steps that drafted "
        "as deep",
    ]


class BufferState(Struct, frozen=True, kw_only=True):
    """The sequences that are kept to train the drafter."""

    sequences: Annotated[int, "sequences that are kept"]
    tokens: Annotated[int, "their tokens, with those of prompts"]
    bytes: Annotated[int, "their size"]
    tokens_by_version: Annotated[
        dict[str, int], "the target's weight version -> output tokens; `older`: all before these"
    ]
    feature_tokens: Annotated[int, "tokens whose features the trainer holds"]
    feature_bytes: Annotated[int, "size of these features"]
    directory: Annotated[str | None, "where segment files are; null: sequences are in memory only"]
    disk_error: Annotated[str, "why sequences are not written to files now; else empty"]
    offered: Annotated[int, "sequences recorded since the engine has started"]
    dropped: Annotated[int, "those of them that were lost as the trainer was slow or away"]
    refused: Annotated[int, "sequences and files that did not fit, since the trainer has started"]
    refusals: Annotated[list[str], "the last reasons for that, newest last"]


class CandidateState(Struct, frozen=True, kw_only=True):
    """A trained drafter, replayed on held-out prompts against the active one."""

    version: Annotated[str, "the weight version under which it is adopted"]
    target_version: Annotated[str, "the target's version that it was trained for"]
    drafter_version: Annotated[str, "the drafter that was in force"]
    outcome: Annotated[
        str,
        "adopted, offered (being pushed), no_gain, worse, self_check (a replay did not repeat the "
        "server's own counts), weights_changed or asleep (before its push), or the code of the "
        "error that ended its push",
    ]
    groups: Annotated[int, "held-out prompts that it was judged on"]
    gain: Annotated[float, "mean of (before - after) / (before + after), in cycles"]
    interval: Annotated[list[float], "that holds the gain at all times at once, with 95 %"]
    accept_length: Annotated[float, "replayed tokens per cycle"]
    accept_length_before: Annotated[float, "the same of the drafter in force"]
    ms_per_cycle: Annotated[
        float | None,
        "milliseconds of a replayed cycle, for a sequence that runs alone, by the step times that "
        "the engine has measured; null: it has measured none",
    ]
    ms_per_cycle_before: Annotated[float | None, "the same of the drafter in force"]
    ms_per_token: Annotated[float | None, "milliseconds of a token, likewise"]
    ms_per_token_before: Annotated[float | None, "the same of the drafter in force"]
    accepted_at_depth: Annotated[list[float], "share of its cycles that accept 1, 2, ... drafts"]


class TrainerStatus(Struct, frozen=True, kw_only=True):
    """The trainer process. Counts are since it has started."""

    state: Annotated[
        Literal[
            "idle", "training", "parking", "parked", "evaluating", "adopting", "paused", "failed"
        ],
        "idle: waits for sequences or an idle engine; parked: keeps a half-done step while the "
        "engine works; failed: the process has ended, or this drafter cannot be trained",
    ]
    reason: Annotated[str, "why it is in this state, where that is not obvious"]
    pause_left_s: Annotated[
        float | None, "seconds that a pause with `for_s` lasts yet; null: it is in none"
    ]
    device: Annotated[
        str,
        "where it trains: cpu, cuda (the GPU that computes) or another GPU; empty before the "
        "engine was ready",
    ]
    slowdown: Annotated[
        float | None,
        "time of a step of the engine while the trainer runs, over its time without; null: too few "
        "steps have run next to it",
    ]
    process: Annotated[ProcessPhase, "failed: it ended and is started again soon"]
    error: Annotated[
        str,
        "how the last process ended, whose own words are in the standard error of the server; "
        "empty: none has",
    ]
    restarts: Annotated[int, "processes after the first one"]
    trained_on: Annotated[str, "the target's version whose weights it has; empty: none yet"]
    steps: Annotated[int, "optimizer steps, over restarts too"]
    rounds: Annotated[int, "rounds of training, over restarts too"]
    tokens: Annotated[int, "tokens trained on"]
    recomputed_tokens: Annotated[int, "those whose features were computed again in idle time"]
    loss: Annotated[float | None, "of the last step; null: there was none"]
    undone_steps: Annotated[int, "steps whose loss or gradient was not finite"]
    without_features: Annotated[
        int, "sequences that the last round left out, as they have no features"
    ]
    recorded_tokens: Annotated[int, "output tokens since the last round"]
    interval_tokens: Annotated[int, "output tokens after which the next round is due"]
    quiet_s: Annotated[float, "time for which the engine must be idle before it goes on"]
    parkings: Annotated[int, "times that a request has interrupted it"]
    adopted: Annotated[int, "drafters that were adopted"]
    refused: Annotated[dict[str, int], "reason -> rounds that ended without an adoption"]
    compared_cycles: Annotated[int, "cycles that the self-check has replayed"]
    different_cycles: Annotated[int, "those whose counts were not the server's"]
    candidate: Annotated[CandidateState | None, "the last one; null: there was none"]
    memory_bytes: Annotated[int, "memory of the process"]
    micro_batch: Annotated[int, "tokens of a micro-batch"]
    checkpoints: Annotated[int, "checkpoints that were written"]
    checkpoint_stall_ms: Annotated[float, "time for which the last one kept the training waiting"]
    checkpoint_error: Annotated[str, "why the last one was not written or read; else empty"]


class DrafterState(Struct, frozen=True, kw_only=True):
    """The served drafters, and the recorded training sequences."""

    target_version: Annotated[str, "the target's weight version that is live"]
    drafters: Annotated[list[ServedDrafter], "drafters that are loaded"]
    training: Annotated[str, "the setting drafter_training"]
    trainer: Annotated[TrainerStatus | None, "the trainer process; null: drafter_training is off"]
    buffer: Annotated[BufferState | None, "null: nothing is recorded"]


class ExportReply(Struct, frozen=True, kw_only=True):
    """A drafter that was written and read back."""

    directory: Annotated[str, "where it is, below the state directory"]
    layout: Annotated[str, "of its files"]
    version: Annotated[str, "the drafter's version"]
    said: Annotated[str, "what the export compared"]


def trainer_status(link: TrainerLink) -> TrainerStatus:
    spot, judged = link.spot, link.spot.candidate
    return TrainerStatus(
        state="failed" if link.phase == "failed" else spot.state.value,
        pause_left_s=link.hold_left_s,
        device=link.device,
        slowdown=link.slowdown,
        process=link.phase,
        error=link.error,
        restarts=link.restarts,
        candidate=candidate_state(judged) if judged is not None else None,
        **{
            name: getattr(spot, name)
            for name in _same(TrainerStatus, spot)
            if name not in ("state", "candidate")
        },
    )


def candidate_state(judged: Judged) -> CandidateState:
    return CandidateState(
        interval=[judged.gain_low, judged.gain_high],
        **{name: getattr(judged, name) for name in _same(CandidateState, judged)},
    )


def _same(ours: type[Struct], theirs: Struct) -> list[str]:
    """Return the fields common to both."""
    return [name for name in ours.__struct_fields__ if name in theirs.__struct_fields__]
