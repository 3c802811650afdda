"""Metrics of the sequences that are kept to train the drafter."""

from __future__ import annotations

from tlt_server.metrics.kinds import Kinds
from tlt_server.wire.events import BufferReport


class SampleMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._tokens = kinds.gauge(
            "tlt_drafter_buffer_tokens",
            "Output tokens kept to train the drafter, by the target's weight version.",
            "version",
        )
        self._bytes = kinds.gauge(
            "tlt_drafter_buffer_bytes", "Size of what is kept to train the drafter."
        )
        self._sequences = kinds.gauge(
            "tlt_drafter_buffer_sequences", "Sequences kept to train the drafter."
        )
        self._feature_tokens = kinds.gauge(
            "tlt_drafter_feature_tokens", "Tokens whose captured features the trainer holds."
        )
        self._feature_bytes = kinds.gauge(
            "tlt_drafter_feature_bytes", "Size of the captured features that the trainer holds."
        )
        self._refused = kinds.counter(
            "tlt_drafter_samples_refused", "Recorded sequences and files that do not fit."
        )
        self._in_memory = kinds.gauge(
            "tlt_drafter_buffer_memory_only",
            "1 while the disk takes no sequences, so that a restart would lose them.",
        )
        self.restarts = kinds.counter("tlt_trainer_restarts", "Restarts of the trainer process.")
        self._counted = 0

    def took(self, report: BufferReport) -> None:
        self._tokens.clear()
        for version, tokens in report.tokens_by_version.items():
            self._tokens.labels(version).set(tokens)
        self._bytes.set(report.size)
        self._sequences.set(report.sequences)
        self._feature_tokens.set(report.feature_tokens)
        self._feature_bytes.set(report.feature_size)
        self._in_memory.set(bool(report.disk_error))
        new = report.refused - self._counted
        self._refused.inc(new if new >= 0 else report.refused)  # a new process counts from 0
        self._counted = report.refused
