"""Hands the states of finished sequences to the trainer: features and last hidden states.

States belong to KV pages. A sequence's pages have the states of all its computed positions, even if
another sequence with the same prefix computed them, so all are taken at its end. Nothing waits: if
the ring is full, the states are dropped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from tlt_server.attention.rows import KVCache
from tlt_server.samples.hidden_states import (
    BEYOND,
    FLOAT32,
    Captured,
    captured_parts,
    key_of,
    state_bytes,
)
from tlt_server.samples.ring import Buffer, RingProducer

if TYPE_CHECKING:
    from tlt_server.engine.schedule.sequence import Sequence
    from tlt_server.engine.settings import EngineSettings


class StateBytes(NamedTuple):
    """States of the first T positions of a sequence."""

    features: Buffer  # [T, F]
    hidden: Buffer  # [T, H]


Deliver = Callable[[StateBytes | None], None]


class StateSource(Protocol):
    """States by KV page."""

    item: Literal[2, 4]  # bytes of a number
    feature_width: int
    hidden_width: int
    spent_s: float  # time that steps took for copies

    def take(self, pages: list[int], length: int, deliver: Deliver) -> None:
        """Deliver copies of the states of the first `length` positions of these pages, now or
        later; None if some are missing.
        """


def describe_states(token_bytes: int, settings: EngineSettings) -> str:
    """Return start-up's line about features: bytes per token, and tokens that fit."""
    return (
        f"; features for the trainer: {token_bytes} bytes a token, room for "
        f"{settings.ring_bytes // token_bytes} on their way (drafter_ring_mb) and "
        f"{settings.feature_bytes // token_bytes} held (drafter_feature_mb)"
    )


class CachedStates:
    """States kept in the KV cache of a CPU."""

    spent_s = 0.0  # a step copies nothing

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.item: Literal[2, 4] = FLOAT32
        self.feature_width, self.hidden_width = (x.shape[1] for x in cache.gather([], 0))

    def take(self, pages: list[int], length: int, deliver: Deliver) -> None:
        features_TF, hidden_TH = self._cache.gather(pages, length)
        deliver(StateBytes(features_TF.numpy().data, hidden_TH.numpy().data))


class Capture:
    def __init__(self, ring: RingProducer, source: StateSource) -> None:
        self._ring, self._source = ring, source
        self.token_bytes = state_bytes(source.feature_width, source.hidden_width, source.item)
        self.captured = self.dropped = self.incomplete = 0  # sequences
        self._spent_s = 0.0  # at their ends

    def ended(self, sequence: Sequence, version: str) -> None:
        """Offer the states of a sequence that still has its pages. A preempted sequence, or one
        with mixed-version KV, has no states to offer.
        """
        began = time.perf_counter()
        self._take(sequence, version)
        self._spent_s += time.perf_counter() - began

    def _take(self, sequence: Sequence, version: str) -> None:
        length = sequence.length - 1
        if sequence.computed < length or sequence.mixed_version:
            self.incomplete += 1
            return
        if self._ring.room < length * self.token_bytes + BEYOND:
            self.dropped += 1
            return
        described = Captured(
            version=version,
            key=key_of(sequence.tokens.astype("<i4").tobytes()),
            length=length,
            item=self._source.item,
            feature_width=self._source.feature_width,
            hidden_width=self._source.hidden_width,
            features=b"",
            hidden=b"",
        )
        self._source.take([*sequence.pages], length, partial(self._offer, described))

    def _offer(self, described: Captured, states: StateBytes | None) -> None:
        if states is None:
            self.incomplete += 1
            return
        kept = self._ring.offer(*captured_parts(described, *states))
        self.captured += kept
        self.dropped += not kept

    def gauges(self) -> dict[str, float]:
        return {
            "states_captured": self.captured,
            "states_dropped": self.dropped,
            "states_incomplete": self.incomplete,
            "states_s": self._spent_s + self._source.spent_s,
        }
