"""Metrics of the trainer of the drafter."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge

from tlt_server.metrics.kinds import Kinds
from tlt_server.wire.training import Judged, SpotReport, TrainerState

PARKING_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class TrainingMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._state = kinds.gauge(
            "tlt_trainer_state", "1 for the state that the trainer is in.", "state"
        )
        self._steps = kinds.gauge(
            "tlt_trainer_steps", "Optimizer steps of the drafter in training, over restarts."
        )
        self._rounds = kinds.gauge("tlt_trainer_rounds", "Rounds of training, over restarts.")
        self._loss = kinds.gauge("tlt_trainer_loss", "Loss of the last step.")
        self._loss_at_depth = kinds.gauge(
            "tlt_trainer_loss_at_depth", "Loss of the last step, by unrolled step.", "depth"
        )
        self._stall_s = kinds.gauge(
            "tlt_trainer_checkpoint_stall_seconds",
            "Time for which the last checkpoint kept the training waiting.",
        )
        self._memory = kinds.gauge("tlt_trainer_memory_bytes", "Memory of the trainer process.")
        self._interval = kinds.gauge(
            "tlt_trainer_interval_tokens", "Output tokens to record before the next round."
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
        self._tokens = kinds.counter(
            "tlt_trainer_tokens", "Tokens trained on, by where their features come from.", "source"
        )
        self._adopted = kinds.counter("tlt_drafter_adoptions", "Drafters that were adopted.")
        self._undone = kinds.counter(
            "tlt_trainer_undone_steps", "Steps undone, as loss or gradient was not finite."
        )
        self._different = kinds.counter(
            "tlt_drafter_self_check_differences",
            "Cycles of the server's own that a replay does not repeat.",
        )
        self._refused = kinds.counter(
            "tlt_drafter_candidates_refused", "Candidates and rounds without one.", "reason"
        )
        self._last = SpotReport()

    def took(self, report: SpotReport) -> None:
        """Take a report in. Counts of a new process begin at 0."""
        last = self._last
        for state in TrainerState:
            self._state.labels(state.value).set(state == report.state)
        self._steps.set(report.steps)
        self._memory.set(report.memory_bytes)
        self._interval.set(report.interval_tokens)
        self._rounds.set(report.rounds)
        self._stall_s.set(report.checkpoint_stall_ms / 1e3)
        if report.loss is not None:
            self._loss.set(report.loss)
        _by_depth(self._loss_at_depth, report.loss_at_depth)
        if report.candidate is not None:
            self._judged(report.candidate)
        for latency_ms in report.parking_ms:
            self._parking_s.observe(latency_ms / 1e3)
        for counter, now, before in (
            (self._tokens.labels("captured"), _captured(report), _captured(last)),
            (self._tokens.labels("recomputed"), report.recomputed_tokens, last.recomputed_tokens),
            (self._adopted, report.adopted, last.adopted),
            (self._undone, report.undone_steps, last.undone_steps),
            (self._different, report.different_cycles, last.different_cycles),
        ):
            counter.inc(now - before if now >= before else now)
        for reason, count in report.refused.items():
            before = last.refused.get(reason, 0)
            self._refused.labels(reason).inc(count - before if count >= before else count)
        self._last = report

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


def _captured(report: SpotReport) -> int:
    return report.tokens - report.recomputed_tokens


def _by_depth(gauge: Gauge, values: Sequence[float | None]) -> None:
    for depth, value in enumerate(values, start=1):
        if value is not None:
            gauge.labels(str(depth)).set(value)
