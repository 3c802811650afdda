"""Waits that double while one failure follows another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

FIRST_S, MAX_S = 0.25, 30.0
CALM_S = 60.0  # without a failure, after which the next wait is the first again


class DoublingWait:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_s, self._wait_s = clock, -math.inf, 0.0

    def longer(self) -> float:
        """Return the seconds to wait after the failure that has just come."""
        now_s = self._clock()
        again = now_s - self._last_s < CALM_S
        self._wait_s = min(MAX_S, 2 * self._wait_s) if again else FIRST_S
        self._last_s = now_s
        return self._wait_s
