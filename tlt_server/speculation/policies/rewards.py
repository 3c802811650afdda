"""The rewards of one arm in one batch bucket: a sliding window with its mean and the standard error of it.

Reward = emitted tokens / step time, in tokens per second of the whole batch. The mean of per-cycle rewards is used rather
than tokens over seconds of the window, because one stalled step then costs one sample and not its own length.
"""

from __future__ import annotations

import math
from collections import deque

ASSUMED_SPREAD = 0.3  # relative standard deviation assumed beside the first samples
ASSUMED_SAMPLES = 2.0  # how many samples that assumption counts for


class Rewards:
    def __init__(self, window: int) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (reward, step_s)
        self._window = window
        self._sum = self._squares = self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, reward: float, step_s: float) -> None:
        if len(self._samples) == self._window:
            self._drop()
        self._samples.append((reward, step_s))
        self._sum += reward
        self._squares += reward * reward
        self._seconds += step_s

    def keep_last(self, count: int) -> None:
        while len(self._samples) > count:
            self._drop()

    @property
    def rate(self) -> float:
        """Mean reward, tokens per second; 0 without samples."""
        return self._sum / len(self._samples) if self._samples else 0.0

    @property
    def step_s(self) -> float:
        return self._seconds / len(self._samples) if self._samples else 0.0

    @property
    def error(self) -> float:
        """Standard error of `rate`."""
        count = len(self._samples)
        if not count:
            return math.inf
        spread = max(0.0, self._squares - count * self.rate**2) + ASSUMED_SAMPLES * (ASSUMED_SPREAD * self.rate) ** 2
        return math.sqrt(spread / (count - 1 + ASSUMED_SAMPLES) / count)

    def scale(self, factor: float) -> None:
        """Multiply every reward, when other evidence says that all of them have changed alike."""
        self._samples = deque((reward * factor, step_s) for reward, step_s in self._samples)
        self._sum *= factor
        self._squares *= factor * factor

    def trim_if_drifted(self, recent: int) -> float:
        """Forget all but the `recent` last samples when those differ from the rest by more than four standard errors.

        Returns the new mean over the old one; 1 when nothing has changed.
        """
        count = len(self._samples)
        if count < 2 * recent:
            return 1.0
        new = sum(self._samples[i][0] for i in range(count - recent, count)) / recent
        old = (self._sum - new * recent) / (count - recent)
        deviation = math.sqrt(max(0.0, self._squares / count - self.rate**2))
        if old <= 0 or abs(new - old) <= 4 * deviation * math.sqrt(1 / recent + 1 / (count - recent)):
            return 1.0
        self.keep_last(recent)
        return new / old

    def _drop(self) -> None:
        reward, step_s = self._samples.popleft()
        self._sum -= reward
        self._squares -= reward * reward
        self._seconds -= step_s
        if not self._samples:
            self._sum = self._squares = self._seconds = 0.0
