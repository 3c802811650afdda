"""Hands the states of finished sequences to the trainer: features and last hidden states.

A sequence's pages hold the states of all its computed positions, also where another sequence with
the same prefix computed them, so one copy at its end is all there is to do. Nothing waits: without
room in the ring the states are dropped and counted, before anything is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tlt_server.samples.captured import (
    BEYOND,
    FLOAT32,
    Captured,
    encode_captured,
    key_of,
    state_bytes,
)
from tlt_server.samples.ring import RingProducer

if TYPE_CHECKING:
    from tlt_server.attention.rows import States
    from tlt_server.engine.sequence import Sequence

Gather = Callable[[list[int], int], "States"]  # (pages, positions) -> copies


class Capture:
    def __init__(self, ring: RingProducer, gather: Gather) -> None:
        self._ring, self._gather = ring, gather
        first = gather([], 0)  # no positions, but their widths
        self.token_bytes = state_bytes(
            first.features_TF.shape[1], first.hidden_TH.shape[1], FLOAT32
        )
        self.captured = self.dropped = self.incomplete = 0  # sequences

    def ended(self, sequence: Sequence, version: str) -> None:
        """Offer the states of a sequence that still has its pages. One whose KV is of two weight
        versions, or that was preempted, has no states to give.
        """
        length = sequence.length - 1
        if sequence.computed < length or sequence.mixed_version:
            self.incomplete += 1
            return
        if self._ring.room < length * self.token_bytes + BEYOND:
            self.dropped += 1
            return
        features_TF, hidden_TH = self._gather(sequence.pages, length)
        captured = Captured(
            version=version,
            key=key_of(sequence.tokens.astype("<i4").tobytes()),
            length=length,
            item=FLOAT32,
            feature_width=features_TF.shape[1],
            hidden_width=hidden_TH.shape[1],
            features=features_TF.numpy().tobytes(),
            hidden=hidden_TH.numpy().tobytes(),
        )
        kept = self._ring.offer(encode_captured(captured))
        self.captured += kept
        self.dropped += not kept

    def gauges(self) -> dict[str, float]:
        return {
            "states_captured": self.captured,
            "states_dropped": self.dropped,
            "states_incomplete": self.incomplete,
        }
