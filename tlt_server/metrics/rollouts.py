"""Metrics of rollouts."""

from __future__ import annotations

from tlt_server.metrics.kinds import Kinds


class RolloutMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.kept = kinds.gauge("tlt_rollouts", "Rollouts kept, by status.", "status")
        self.bytes = kinds.gauge("tlt_rollout_bytes", "Size of all rollouts' journals.")
        self.resumed = kinds.counter(
            "tlt_resumed_sequences", "Sequences of rollouts given to another engine to go on with."
        )
        for status in ("running", "done"):
            self.kept.labels(status)
