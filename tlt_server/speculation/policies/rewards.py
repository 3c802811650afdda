"""The rewards of one arm in one batch bucket: a sliding window, its rate and the standard error of
it.

Reward = emitted tokens / step time, in tokens per second of the whole batch. The rate of a window
is the mean of the emitted tokens over the *median* of the step times: a stalled step then says
nothing, while a median of the tokens (1 or 2 for a draft of one) would call an arm good that is
right in 51 % of its cycles.
"""

from __future__ import annotations

import math
from collections import deque

# Relative standard deviation of tokens and of times that is assumed with the first samples.
ASSUMED_SPREAD = 0.3
ASSUMED_SAMPLES = 2.0  # how many samples that assumption counts for
EXACT = 24  # samples up to which times are sorted at every cycle
REFRESH = 16  # cycles between two sorts of a longer window
CHECK = 6  # cycles between two looks for drift


class Rewards:
    def __init__(self, window: int) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (tokens, step_s)
        self._window = window
        self._tokens = self._squares = 0.0
        self._stale = self._unchecked = 0
        self.step_s = 0.0  # median of the window
        self._time_spread = 0.0  # relative

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, tokens: float, step_s: float) -> None:
        if len(self._samples) == self._window:
            self._drop()
        self._samples.append((tokens, step_s))
        self._tokens += tokens
        self._squares += tokens * tokens
        self._stale += 1
        self._unchecked += 1
        if len(self._samples) <= EXACT or self._stale >= REFRESH:
            self._sort_times()

    def keep_last(self, count: int) -> None:
        if len(self._samples) > count:
            while len(self._samples) > count:
                self._drop()
            self._sort_times()

    @property
    def rate(self) -> float:
        """Tokens per second; 0 without samples."""
        return self._tokens / len(self._samples) / self.step_s if self._samples else 0.0

    @property
    def error(self) -> float:
        """Standard error of `rate`."""
        count = len(self._samples)
        if not count:
            return math.inf
        mean = max(self._tokens / count, 1e-9)
        assumed = ASSUMED_SAMPLES * ASSUMED_SPREAD**2
        known = count - 1 + ASSUMED_SAMPLES
        tokens = (max(0.0, self._squares / mean**2 - count) + assumed) / known
        times = ((count - 1) * self._time_spread**2 + assumed) / known
        return self.rate * math.sqrt((tokens + times) / count)

    def trim_if_drifted(self, recent: int) -> float:
        """Forget all but the `recent` last samples when those differ from the rest by more than
        four standard errors.

        Returns the new rate over the old one; 1 when nothing has changed.
        """
        count = len(self._samples)
        if count < 2 * recent or self._unchecked < CHECK:
            return 1.0
        self._unchecked = 0
        last = [self._samples[i] for i in range(count - recent, count)]
        tokens = sum(sample[0] for sample in last)
        new = tokens / recent / sorted(step_s for _, step_s in last)[recent // 2]
        old = (
            (self._tokens - tokens) / (count - recent) / self.step_s
        )  # the median of all stands for that of the rest
        error = self.error * math.sqrt(count)
        if old <= 0 or abs(new - old) <= 4 * error * math.sqrt(1 / recent + 1 / (count - recent)):
            return 1.0
        self.keep_last(recent)
        return new / old

    def _sort_times(self) -> None:
        times = sorted(step_s for _, step_s in self._samples)
        count = len(times)
        self.step_s = (times[(count - 1) // 2] + times[count // 2]) / 2
        self._time_spread = (
            (times[3 * count // 4] - times[count // 4]) / 1.35 / self.step_s
        )  # quartiles of a normal distribution
        self._stale = 0

    def _drop(self) -> None:
        tokens, _ = self._samples.popleft()
        self._tokens -= tokens
        self._squares -= tokens * tokens
