"""The modes of `drafter_training` in the trainer process, and the times of rounds and trials:
training only where it pays. No torch.

The engine chooses the trainer's device once it knows its own (`engine.devices.training`).

A round is due once enough output tokens were recorded since the last one, and immediately after a
round that had no trial or whose candidate improved on earlier ones. Two rounds in a row without
gain double that number; a weight push or a falling acceptance resets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tlt_server.samples.activity import REASONS, Reason
from tlt_server.samples.sample import Sample

# The engine measures steps as it starts, and a push makes most of a round useless.
ALWAYS: frozenset[Reason] = frozenset(("weights", "engine"))
MOST_THREADS = 2


class TrainingMode(NamedTuple):
    parks_for: frozenset[Reason]
    threads: Callable[[int, int], int]  # (processors, the engine's threads) -> its own
    shares: bool = False  # it runs kernels while the engine does, on one GPU


def half(processors: int, engine: int) -> int:
    return min(MOST_THREADS, max(1, processors // 2))


def left_over(processors: int, engine: int) -> int:
    """Return the processors that the engine's threads leave; at least one."""
    return max(1, processors - engine)


MODES = {
    "idle": TrainingMode(REASONS, half),
    "device": TrainingMode(ALWAYS, left_over),
    "share": TrainingMode(ALWAYS, left_over, shares=True),
}

FIRST_TOKENS, MOST_TOKENS = 4096, 2**24
PATIENCE = 2  # rounds without gain
# Weights of the newest sequence in the short and the long mean of acceptance.
SHORT, LONG = 0.1, 0.005
FALL = 0.95  # short mean over long mean at which acceptance has fallen
SEEN = 50  # sequences before the means are compared
FIRST_STEPS, MOST_STEPS = 24, 192  # per trial
WORTH = 0.01  # gain on the best candidate so far that makes the steps before it pay


class Schedule:
    def __init__(self, first: int = FIRST_TOKENS, most: int = MOST_TOKENS) -> None:
        self._first, self._most = first, most
        self.interval = first
        self.recorded = 0  # output tokens since the last round
        self._misses = 0
        self._short = self._long = 0.0  # means of the accepted drafts of a cycle
        self._sequences = 0

    @property
    def due(self) -> bool:
        return self.recorded >= self.interval

    def took(self, sample: Sample) -> None:
        """Count a new sequence."""
        self.recorded += sample.output_len
        drafted = sum(rows > 1 for rows in memoryview(sample.rows).cast("H"))
        if not drafted:
            return
        accepted = sum(sample.own_accepted) / drafted
        self._sequences += 1
        if self._sequences == 1:
            self._short = self._long = accepted
        self._short += SHORT * (accepted - self._short)
        self._long += LONG * (accepted - self._long)
        if self._sequences >= SEEN and self._short < FALL * self._long:
            self._long, self._sequences = self._short, 1
            self.renewed()

    def order(self) -> None:
        """Make a round due now."""
        self.recorded = max(self.recorded, self.interval)

    def began(self) -> None:
        self.recorded = 0

    def judged(self, *, gain: bool) -> None:
        """Learn whether a round gained."""
        self._misses = 0 if gain else self._misses + 1
        if gain:
            self.interval = self._first
            self.order()
        elif self._misses >= PATIENCE:
            self.interval = min(2 * self.interval, self._most)

    def renewed(self) -> None:
        """Reset: the weights or the workload changed."""
        self.interval, self._misses = self._first, 0


class TrialSpacing:
    """The number of steps between two trials: doubled after a trial that paid. Each trial leaves
    less of the run's level for later ones, so a drafter that is still learning is tried rarely.
    """

    def __init__(self) -> None:
        self.left = FIRST_STEPS  # until the next trial
        self._steps, self._best = FIRST_STEPS, 0.0

    def trained(self) -> None:
        """Count a training step."""
        self.left = max(0, self.left - 1)

    def judged(self, gain: float) -> bool:
        """Record a candidate's gain over the active drafter. Return True if its training steps
        paid.
        """
        paid = gain >= self._best + WORTH
        self._best = max(self._best, gain)
        self._steps = min(2 * self._steps, MOST_STEPS) if paid else FIRST_STEPS
        self.left = self._steps
        return paid

    def renewed(self) -> None:
        """Reset the comparison with earlier candidates after a weight change. The spacing stays, as
        every step of an RL run pushes weights.
        """
        self._best = 0.0
