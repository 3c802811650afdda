"""Shares of owners (API keys) in the engine's time: which of their rows the next step leaves out.

`levels` says how many rows one owner may have while others have work too. While an owner that had
work of late has none, the steps of the others stay short, so that its next request need not wait
for a long one: the larger its part of the recent time, the shorter, so that the others lose no more
than about twice what it uses itself. Nothing is ever left out of the steps of an owner that is
alone. No tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import count

from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.levels import Levels, OwnerRows
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.schedule.step_cost import StepCost
from tlt_server.engine.schedule.waiting import WaitingSequences

SHORT = 3.0  # times a step of one row: what a request of an absent owner may have to wait for
MEMORY_MS = 2000.0  # time of steps in which an owner's use fades to a third
SOON_MS, FEWEST_ROWS, MOST_ROWS = 8.0, 16, 512  # bounds of a short step
FORGOTTEN = 1e-3  # an owner with a smaller part of the recent time is not expected back


class TimeShares:
    def __init__(
        self, running: RunningSet, waiting: WaitingSequences, cost: StepCost, *, max_rows: int
    ) -> None:
        self._running, self._waiting, self._cost = running, waiting, cost
        self._max_rows = max_rows
        self._used_ms: dict[str, float] = {}  # by owner: steps while it ran something, fading
        self._all_ms = 0.0
        self._stuck: set[str] = set()  # owners that wait and could not start
        self._turns = count(1)

    def observe(self, batch: Batch, ms: float) -> None:
        """Take in the time of a step."""
        self._cost.observe(batch.context.decoding, batch.context.prefill_rows, ms)
        fade = math.exp(-ms / MEMORY_MS)
        self._all_ms = self._all_ms * fade + ms
        used = {owner: before * fade for owner, before in self._used_ms.items()}
        for owner in batch.owners:
            used[owner] = used.get(owner, 0.0) + ms
        least = FORGOTTEN * self._all_ms
        self._used_ms = {owner: each for owner, each in used.items() if each > least}

    def expected(self) -> int:
        """Count the owners that run nothing and wait, or had work of late."""
        return len((self._used_ms.keys() | self._waiting.owners) - self._running.owners.keys())

    def cuts(self) -> dict[str, OwnerRows]:
        """Return the rows in the next step of each owner that has to leave some out."""
        owners = self._running.owners.keys() | self._waiting.owners
        if len(owners) < 2 and self._used_ms.keys() <= owners:
            return {}
        wanted = self._wanted()
        absent_ms = sum(used for owner, used in self._used_ms.items() if owner not in wanted)
        if not wanted:
            return {}
        used = [self._used_ms.get(owner, 0.0) / (self._all_ms or 1.0) for owner in wanted]
        levels = Levels(wanted.values(), used, self._cost)
        found = [levels.fair()]
        if absent_ms:
            longest = max(SHORT, self._all_ms / absent_ms / 2)
            found.append(levels.within(longest * self._cost.ms(1, 0)))
        level = min((each for each in found if each is not None), default=None)
        if level is None:
            return {}
        return {owner: rows.cut(level) for owner, rows in wanted.items() if rows.total > level}

    def in_turn(self, cuts: Mapping[str, OwnerRows]) -> list[Sequence]:
        """Return the decoding sequences that may be in the next step; those of an owner that leaves
        some out take turns.
        """
        due = [each for each in self._running if each.unlaunched <= 1 and each.due]
        left_out = set[Sequence]()
        for owner, cut in cuts.items():
            own = [sequence for sequence in due if sequence.owner == owner]
            own.sort(key=lambda sequence: sequence.turn)
            left_out.update(own[cut.decoding :])
            for sequence in own[: cut.decoding]:
                sequence.turn = next(self._turns)
        return [sequence for sequence in due if sequence not in left_out]

    def soon_over(self, rows: int) -> int:
        """Return how many of these prompt rows a step may have that is to end within SOON_MS."""
        rows = min(rows, MOST_ROWS)
        while rows > FEWEST_ROWS and self._cost.ms(0, rows) > SOON_MS:
            rows //= 2
        return rows

    def settled(self, cuts: Mapping[str, OwnerRows]) -> None:
        """Note that all has started that can: an owner that runs nothing and was not cut asks for
        no rows as long as it waits.
        """
        self._stuck = self._waiting.owners - self._running.owners.keys() - cuts.keys()

    def _wanted(self) -> dict[str, OwnerRows]:
        """Return the rows that each owner with work would have in a step of its own."""
        decoding, prompt = Counter[str](), Counter[str]()
        for sequence in self._running:
            if sequence.unlaunched > 1:
                prompt[sequence.owner] += sequence.unlaunched
            else:
                decoding[sequence.owner] += sequence.due
        for owner, sequence in self._waiting.firsts().items():
            if owner not in self._stuck:
                prompt[owner] += sequence.length
        wanted = {
            owner: OwnerRows(decoding[owner], min(prompt[owner], self._max_rows))
            for owner in decoding.keys() | prompt.keys()
        }
        return {owner: rows for owner, rows in wanted.items() if rows.total}
