"""Gathers the features for a round of training: asks the engine to compute missing ones, and
decides when a round may start. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tlt_server.wire.commands import Recompute

LOOK_S = 0.1  # between looks for features
# The wait for the next ones that were asked for: without any to train on, and with some. In an RL
# step the engine may be idle for seconds only, and a push makes features useless.
PATIENCE_S, LITTLE_PATIENCE_S = 10.0, 2.0


class Lacking(NamedTuple):
    """Sequences without features, and the command that computes those of the first ones."""

    sequences: int
    command: Recompute


class NeedsFeatures(Protocol):
    """A round's need for features."""

    def lacking(self) -> Lacking:
        """Return the sequences of the next round that lack features."""

    def ready(self) -> bool:
        """Return True if there are features to train on."""


class FeatureGathering:
    def __init__(self, send: Callable[[Recompute], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._asked: Lacking | None = None  # the last request to the engine
        self._came = 0  # sequences of it that have features by now
        self._look_s = self._came_s = 0.0

    def begin_again(self) -> None:
        """Stop waiting for features: the weights changed."""
        self._asked = None

    def done(self, work: NeedsFeatures) -> bool:
        """Return True if a round may start: no features are missing, or the engine computes no more
        of them.
        """
        now_s = self._clock()
        if self._asked is not None and now_s < self._look_s:
            return False
        self._look_s = now_s + LOOK_S
        lacking, before = work.lacking(), self._asked
        if before is not None:
            came = before.sequences - lacking.sequences
            if came > self._came:
                self._came, self._came_s = came, now_s
            asked = len(before.command.texts)
            if self._came < asked and self._waits(now_s - self._came_s, work):
                return False
        if not lacking.command.texts or (before is not None and not self._came):
            self._asked = None
            return True
        self._asked, self._came, self._came_s = lacking, 0, now_s
        self._send(lacking.command)
        return False

    def _waits(self, waited_s: float, work: NeedsFeatures) -> bool:
        return waited_s < LITTLE_PATIENCE_S or (waited_s < PATIENCE_S and not work.ready())
