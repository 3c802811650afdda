"""The level of a step: how many rows one owner (API key) may have in it, so that an owner with many
rows does not slow down one with few. No tensors.

Owners that ask for more are cut to the level, which no other owner exceeds. The step then takes at
most `SLOWER` times what it would take without the cut ones, or, where they are more than half of
the owners, as many times as gives each of them its share of the time. So an owner below the level
runs at half of the speed that it would have without them, or at its share of that. Where owners
below the level had work in a part of the recent time only, the cut ones have the rest of it for
themselves, so that part of these times is enough, but `LEAST`. Where rows cost little, as on a GPU,
or where all ask for about as much, nothing is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple

from tlt_server.engine.schedule.step_cost import StepCost

SLOWER = 2.0  # times the step without those that are cut
LEAST = 1.25  # likewise, where those have enough of the time for themselves


class OwnerRows(NamedTuple):
    """The rows of one owner in a step: sequences that decode, and rows of prompts."""

    decoding: int
    prompt: int

    @property
    def total(self) -> int:
        return self.decoding + self.prompt

    def cut(self, level: int) -> OwnerRows:
        """Return `level` of them at most. Where both kinds ask for more, each has half."""
        decoding = min(self.decoding, max(level - self.prompt, -(-level // 2)))
        return OwnerRows(decoding, min(self.prompt, level - decoding))


class Levels:
    """The levels of a step in which owners want these rows. `used`: of each owner, the part of the
    recent time in which it had work.
    """

    def __init__(
        self, wanted: Collection[OwnerRows], used: Collection[float], cost: StepCost
    ) -> None:
        self._cost = cost
        pairs = sorted(zip(wanted, used, strict=True), key=lambda pair: pair[0].total)
        ascending, self._used = [rows for rows, _ in pairs], [used for _, used in pairs]
        self._totals = [rows.total for rows in ascending]
        self._rows_below = [0, *accumulate(self._totals)]  # by number of owners
        self._decoding_below = [0, *accumulate(rows.decoding for rows in ascending)]

    def fair(self) -> int | None:
        """Return the level that keeps the promise above; None if that needs none."""
        owners, used = len(self._totals), 0.0
        for first in range(1, owners):  # the number of owners with all their rows
            used = min(1.0, used + self._used[first - 1])
            slower = max(LEAST, used * max(SLOWER, owners / first))
            decoding = self._decoding_below[first]
            limit_ms = slower * self._cost.ms(decoding, self._rows_below[first] - decoding)
            below, next_one = self._totals[first - 1 : first + 1]
            if below < next_one and self._ms(next_one) > limit_ms:
                return max(below, self.within(limit_ms) or 1)
        return None

    def within(self, limit_ms: float) -> int | None:
        """Return the highest level, at least 1, at which the step takes no longer; None if it takes
        no longer without one.
        """
        levels = range(1, self._totals[-1] + 1)
        highest = bisect_right(levels, limit_ms, key=self._ms)
        return None if highest == len(levels) else max(1, highest)

    def _ms(self, level: int) -> float:
        """Return the time at a level, as if decode rows and prompt rows were cut in equal parts."""
        first = bisect_right(self._totals, level)
        rows = self._rows_below[first] + level * (len(self._totals) - first)
        decoding = self._decoding_below[-1] * rows / max(1, self._rows_below[-1])
        return self._cost.ms(decoding, rows - decoding)
