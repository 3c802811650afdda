"""The modes of `drafter_training` in the trainer process. No torch.

The engine chooses the trainer's device once it knows its own (`engine.devices.training`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tlt_server.samples.activity import REASONS, Reason

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
