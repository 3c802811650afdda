"""Metrics of the drafter's trainer, and of its recorded sequences."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge

from tlt_server.metrics.kinds import Kinds, Total
from tlt_server.wire.events import BufferReport
from tlt_server.wire.training import Judged, SpotReport, TrainerState

PARKING_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


GAUGES = {  # fields of SpotReport
    "steps": ("tlt_trainer_steps", "Optimizer steps of the drafter in training, over restarts."),
    "rounds": ("tlt_trainer_rounds", "Rounds of training, over restarts."),
    "loss": ("tlt_trainer_loss", "Loss of the last step."),
    "memory_bytes": ("tlt_trainer_memory_bytes", "Memory of the trainer process."),
    "interval_tokens": (
        "tlt_trainer_interval_tokens",
        "Output tokens to record before the next round.",
    ),
}
TOTALS = {  # likewise
    "adopted": ("tlt_drafter_adoptions", "Drafters that were adopted."),
    "undone_steps": (
        "tlt_trainer_undone_steps",
        "Steps undone, as loss or gradient was not finite.",
    ),
    "different_cycles": (
        "tlt_drafter_self_check_differences",
        "Cycles of the server's own that a replay does not repeat.",
    ),
}
KEPT = {  # fields of BufferReport
    "size": ("tlt_drafter_buffer_bytes", "Size of what is kept to train the drafter."),
    "sequences": ("tlt_drafter_buffer_sequences", "Sequences kept to train the drafter."),
    "feature_tokens": (
        "tlt_drafter_feature_tokens",
        "Tokens whose captured features the trainer holds.",
    ),
    "feature_size": (
        "tlt_drafter_feature_bytes",
        "Size of the captured features that the trainer holds.",
    ),
}


class SampleMetrics:
    """Metrics of the recorded training sequences."""

    def __init__(self, kinds: Kinds) -> None:
        self._gauges = kinds.gauges(KEPT)
        self._tokens = kinds.gauge(
            "tlt_drafter_buffer_tokens",
            "Output tokens kept to train the drafter, by the target's weight version.",
            "version",
        )
        self._refused = Total(
            kinds.counter(
                "tlt_drafter_samples_refused", "Recorded sequences and files that do not fit."
            )
        )
        self._in_memory = kinds.gauge(
            "tlt_drafter_buffer_memory_only",
            "1 while the disk takes no sequences, so that a restart would lose them.",
        )
        self.restarts = kinds.counter("tlt_trainer_restarts", "Restarts of the trainer process.")

    def took(self, report: BufferReport) -> None:
        self._tokens.clear()
        for version, tokens in report.tokens_by_version.items():
            self._tokens.labels(version).set(tokens)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(report, name))
        self._in_memory.set(bool(report.disk_error))
        self._refused.follow(report.refused)


class TrainingMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._gauges, self._totals = kinds.gauges(GAUGES), kinds.totals(TOTALS)
        self._state = kinds.gauge(
            "tlt_trainer_state", "1 for the state that the trainer is in.", "state"
        )
        self._loss_at_depth = kinds.gauge(
            "tlt_trainer_loss_at_depth", "Loss of the last step, by unrolled step.", "depth"
        )
        self._stall_s = kinds.gauge(
            "tlt_trainer_checkpoint_stall_seconds",
            "Time for which the last checkpoint kept the training waiting.",
        )
        self._gain = kinds.gauge(
            "tlt_trainer_candidate_gain",
            "Replayed gain of the last candidate: (before - after) / (before + after), in cycles; "
            "low and high bound it with 95 %.",
            "bound",
        )
        self._accept_length = kinds.gauge(
            "tlt_trainer_accept_length",
            "Replayed tokens per cycle of the last candidate and of the drafter then in force.",
            "drafter",
        )
        self._token_s = kinds.gauge(
            "tlt_trainer_token_seconds",
            "Replayed time per token of a sequence that runs alone, with the last candidate and "
            "the drafter then in force, by step times that the engine has measured.",
            "drafter",
        )
        self._accepted = kinds.gauge(
            "tlt_trainer_candidate_accepted_share",
            "Share of the last candidate's replayed cycles that accept as many drafts.",
            "depth",
        )
        self._parking_s = kinds.histogram(
            "tlt_trainer_parking_seconds",
            "From the arrival of a request until the trainer has parked.",
            PARKING_BUCKETS,
        )
        tokens = kinds.counter(
            "tlt_trainer_tokens", "Tokens trained on, by where their features come from.", "source"
        )
        self._captured = Total(tokens.labels("captured"))
        self._recomputed = Total(tokens.labels("recomputed"))
        self._refused_by = kinds.counter(
            "tlt_drafter_candidates_refused", "Candidates and rounds without one.", "reason"
        )
        self._refused: dict[str, Total] = {}

    def took(self, report: SpotReport) -> None:
        for state in TrainerState:
            self._state.labels(state.value).set(state == report.state)
        for name, gauge in self._gauges.items():
            if (value := getattr(report, name)) is not None:
                gauge.set(value)
        for name, total in self._totals.items():
            total.follow(getattr(report, name))
        self._recomputed.follow(report.recomputed_tokens)
        self._captured.follow(report.tokens - report.recomputed_tokens)
        self._stall_s.set(report.checkpoint_stall_ms / 1e3)
        _by_depth(self._loss_at_depth, report.loss_at_depth)
        if report.candidate is not None:
            self._judged(report.candidate)
        for latency_ms in report.parking_ms:
            self._parking_s.observe(latency_ms / 1e3)
        for reason in report.refused:
            self._refused.setdefault(reason, Total(self._refused_by.labels(reason)))
        for reason, total in self._refused.items():
            total.follow(report.refused.get(reason, 0))

    def _judged(self, candidate: Judged) -> None:
        for bound in ("gain", "gain_low", "gain_high"):
            self._gain.labels(bound).set(getattr(candidate, bound))
        self._accept_length.labels("candidate").set(candidate.accept_length)
        self._accept_length.labels("in_force").set(candidate.accept_length_before)
        for drafter, ms in (
            ("candidate", candidate.ms_per_token),
            ("in_force", candidate.ms_per_token_before),
        ):
            if ms is not None:
                self._token_s.labels(drafter).set(ms / 1e3)
        _by_depth(self._accepted, candidate.accepted_at_depth)


def _by_depth(gauge: Gauge, values: Sequence[float | None]) -> None:
    for depth, value in enumerate(values, start=1):
        if value is not None:
            gauge.labels(str(depth)).set(value)
