"""Replies of `/drafter`: the drafters that are served, what is recorded, and the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tlt_server.frontend.link.trainer import ProcessPhase, TrainerLink
from tlt_server.training import Judged


class ServedDrafter(Struct, frozen=True, kw_only=True):
    """A drafter that is loaded, with what the target has accepted of it of late."""

    name: Annotated[str, Meta(description="as strategies name it")]
    architecture: Annotated[
        str | None,
        Meta(description="of its network, as its config.json says; null: it has no network"),
    ]
    weight_version: Annotated[
        str | None, Meta(description="version of its weights; null: it has no network")
    ]
    trained_for: Annotated[
        str | None,
        Meta(
            description="the target's version, or its first 64 characters, that a trainer made "
            "these weights for; null: they are of no trainer"
        ),
    ]
    resting: Annotated[
        bool,
        Meta(description="whether it drafts nothing, as a change of weights collapsed acceptance"),
    ]
    steps: Annotated[
        int,
        Meta(
            description="steps that the next figures are of: the last ones in which all requests "
            "took its drafts"
        ),
    ]
    accept_length: Annotated[
        float | None,
        Meta(description="mean tokens per request and such step; null: there is no such step"),
    ]
    accepted_at_depth: Annotated[
        list[float],
        Meta(
            description="share of requests whose first 1, 2, ... drafts were accepted, of the "
            "steps that drafted as deep"
        ),
    ]


class BufferState(Struct, frozen=True, kw_only=True):
    """The sequences that are kept to train the drafter."""

    sequences: Annotated[int, Meta(description="sequences that are kept")]
    tokens: Annotated[int, Meta(description="their tokens, with those of prompts")]
    bytes: Annotated[int, Meta(description="their size")]
    tokens_by_version: Annotated[
        dict[str, int],
        Meta(description="the target's weight version -> output tokens; `older`: all before these"),
    ]
    feature_tokens: Annotated[int, Meta(description="tokens whose features the trainer holds")]
    feature_bytes: Annotated[int, Meta(description="size of these features")]
    directory: Annotated[
        str | None, Meta(description="where segment files are; null: sequences are in memory only")
    ]
    disk_error: Annotated[
        str, Meta(description="why sequences are not written to files now; else empty")
    ]
    offered: Annotated[int, Meta(description="sequences recorded since the engine has started")]
    dropped: Annotated[
        int, Meta(description="those of them that were lost as the trainer was slow or away")
    ]
    refused: Annotated[
        int, Meta(description="sequences and files that did not fit, since the trainer has started")
    ]
    refusals: Annotated[list[str], Meta(description="the last reasons for that, newest last")]


class CandidateState(Struct, frozen=True, kw_only=True):
    """A drafter that was trained, replayed on held-out prompts against the one in force."""

    version: Annotated[str, Meta(description="the weight version under which it is adopted")]
    target_version: Annotated[str, Meta(description="the target's version that it was trained for")]
    drafter_version: Annotated[str, Meta(description="the drafter that was in force")]
    outcome: Annotated[
        str,
        Meta(
            description="adopted, offered (being pushed), no_gain, worse, self_check (a replay did "
            "not repeat the server's own counts), weights_changed or asleep (before its push), or "
            "the code of the error that ended its push"
        ),
    ]
    groups: Annotated[int, Meta(description="held-out prompts that it was judged on")]
    gain: Annotated[
        float, Meta(description="mean of (before - after) / (before + after), in cycles")
    ]
    interval: Annotated[
        list[float], Meta(description="that holds the gain at all times at once, with 95 %")
    ]
    accept_length: Annotated[float, Meta(description="replayed tokens per cycle")]
    accept_length_before: Annotated[float, Meta(description="the same of the drafter in force")]
    ms_per_cycle: Annotated[
        float | None,
        Meta(
            description="milliseconds of a replayed cycle, for a sequence that runs alone, by the "
            "step times that the engine has measured; null: it has measured none"
        ),
    ]
    ms_per_cycle_before: Annotated[
        float | None, Meta(description="the same of the drafter in force")
    ]
    ms_per_token: Annotated[float | None, Meta(description="milliseconds of a token, likewise")]
    ms_per_token_before: Annotated[
        float | None, Meta(description="the same of the drafter in force")
    ]
    accepted_at_depth: Annotated[
        list[float], Meta(description="share of its cycles that accept 1, 2, ... drafts")
    ]


class TrainerStatus(Struct, frozen=True, kw_only=True):
    """The trainer process. Counts are since it has started."""

    state: Annotated[
        Literal[
            "idle", "training", "parking", "parked", "evaluating", "adopting", "paused", "failed"
        ],
        Meta(
            description="idle: waits for sequences or an idle engine; parked: keeps a half-done "
            "step while the engine works; failed: the process has ended, or this drafter cannot be "
            "trained"
        ),
    ]
    reason: Annotated[str, Meta(description="why it is in this state, where that is not obvious")]
    pause_left_s: Annotated[
        float | None,
        Meta(description="seconds that a pause with `for_s` lasts yet; null: it is in none"),
    ]
    device: Annotated[
        str,
        Meta(
            description="where it trains: cpu, cuda (the GPU that computes) or another GPU; empty "
            "before the engine was ready"
        ),
    ]
    slowdown: Annotated[
        float | None,
        Meta(
            description="time of a step of the engine while the trainer runs, over its time "
            "without; null: too few steps have run next to it"
        ),
    ]
    process: Annotated[ProcessPhase, Meta(description="failed: it ended and is started again soon")]
    error: Annotated[
        str,
        Meta(
            description="how the last process ended, whose own words are in the standard error of "
            "the server; empty: none has"
        ),
    ]
    restarts: Annotated[int, Meta(description="processes after the first one")]
    trained_on: Annotated[
        str, Meta(description="the target's version whose weights it has; empty: none yet")
    ]
    steps: Annotated[int, Meta(description="optimizer steps, over restarts too")]
    rounds: Annotated[int, Meta(description="rounds of training, over restarts too")]
    tokens: Annotated[int, Meta(description="tokens trained on")]
    recomputed_tokens: Annotated[
        int, Meta(description="those whose features were computed again in idle time")
    ]
    loss: Annotated[float | None, Meta(description="of the last step; null: there was none")]
    undone_steps: Annotated[int, Meta(description="steps whose loss or gradient was not finite")]
    without_features: Annotated[
        int, Meta(description="sequences that the last round left out, as they have no features")
    ]
    recorded_tokens: Annotated[int, Meta(description="output tokens since the last round")]
    interval_tokens: Annotated[
        int, Meta(description="output tokens after which the next round is due")
    ]
    quiet_s: Annotated[
        float, Meta(description="time for which the engine must be idle before it goes on")
    ]
    parkings: Annotated[int, Meta(description="times that a request has interrupted it")]
    adopted: Annotated[int, Meta(description="drafters that were adopted")]
    refused: Annotated[
        dict[str, int], Meta(description="reason -> rounds that ended without an adoption")
    ]
    compared_cycles: Annotated[int, Meta(description="cycles that the self-check has replayed")]
    different_cycles: Annotated[int, Meta(description="those whose counts were not the server's")]
    candidate: Annotated[
        CandidateState | None, Meta(description="the last one; null: there was none")
    ]
    memory_bytes: Annotated[int, Meta(description="memory of the process")]
    micro_batch: Annotated[int, Meta(description="tokens of a micro-batch")]
    checkpoints: Annotated[int, Meta(description="checkpoints that were written")]
    checkpoint_stall_ms: Annotated[
        float, Meta(description="time for which the last one kept the training waiting")
    ]
    checkpoint_error: Annotated[
        str, Meta(description="why the last one was not written or read; else empty")
    ]


class DrafterState(Struct, frozen=True, kw_only=True):
    """The drafters that are served, and what is recorded to train one."""

    target_version: Annotated[str, Meta(description="the target's weight version that is live")]
    drafters: Annotated[list[ServedDrafter], Meta(description="drafters that are loaded")]
    training: Annotated[str, Meta(description="the setting drafter_training")]
    trainer: Annotated[
        TrainerStatus | None, Meta(description="the trainer process; null: drafter_training is off")
    ]
    buffer: Annotated[BufferState | None, Meta(description="null: nothing is recorded")]


class ExportReply(Struct, frozen=True, kw_only=True):
    """A drafter that was written and read back."""

    directory: Annotated[str, Meta(description="where it is, below the state directory")]
    layout: Annotated[str, Meta(description="of its files")]
    version: Annotated[str, Meta(description="the drafter's version")]
    said: Annotated[str, Meta(description="what the export compared")]


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
    """Return the fields that both have."""
    return [name for name in ours.__struct_fields__ if name in theirs.__struct_fields__]
