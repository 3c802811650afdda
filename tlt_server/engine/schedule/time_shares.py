"""Shares of owners (API keys) in the engine's time: which of their rows the next step leaves out.

Owners above a level are cut to it. The step then takes at most `SLOWER` times as long as it would
without the cut owners. If they are more than half of the owners, the factor is the one that gives
each owner its share of the time. If the owners below the level had work in only a part of the
recent time, the factor shrinks to that part of it, but not below `LEAST`. Nothing is cut where rows
are cheap, as on a GPU, or where all owners ask for about the same.

While a recently active owner has no work, the steps of the others stay short, so that its next
request need not wait for a long one. The larger its part of the recent time, the shorter the steps,
so that the others lose at most about twice the time that it uses itself. A single owner's steps are
never cut. No tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate, count
from typing import NamedTuple

from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.schedule.step_cost import StepCost, StepLine
from tlt_server.engine.schedule.waiting import WaitingSequences

SLOWER = 2.0  # times the step without those that are cut
LEAST = 1.25  # likewise, where those have enough of the time for themselves
SHORT = 3.0  # times a step of one row: what a request of an absent owner may have to wait for
MEMORY_MS = 2000.0  # time of steps in which an owner's use fades to a third
SOON_MS, FEWEST_ROWS, MOST_ROWS = 8.0, 16, 512  # bounds of a short step
FORGOTTEN = 1e-3  # an owner with a smaller part of the recent time is not expected back


class OwnerRows(NamedTuple):
    """The rows of one owner in a step: decoding sequences and prompt rows."""

    decoding: int
    prompt: int

    @property
    def total(self) -> int:
        return self.decoding + self.prompt

    def cut(self, level: int) -> OwnerRows:
        """Return these rows cut to `level`. If both kinds exceed their half, each gets half."""
        decoding = min(self.decoding, max(level - self.prompt, -(-level // 2)))
        return OwnerRows(decoding, min(self.prompt, level - decoding))


def fair_level(
    wanted: Collection[OwnerRows], used: Collection[float], line: StepLine
) -> int | None:
    """Return the level that keeps the promise of this module; None if no cut is needed. `used`: the
    part of the recent time in which each owner had work.
    """
    owners = sorted(zip(wanted, used, strict=True), key=lambda pair: pair[0].total)
    totals = [rows.total for rows, _ in owners]
    used_below = [*accumulate(part for _, part in owners)]
    decoding_below = [*accumulate(rows.decoding for rows, _ in owners)]
    prompt_below = [*accumulate(rows.prompt for rows, _ in owners)]
    for first in range(1, len(owners)):  # the number of owners with all their rows
        part = min(1.0, used_below[first - 1])
        slower = max(LEAST, part * max(SLOWER, len(owners) / first))
        limit_ms = slower * line.ms(decoding_below[first - 1], prompt_below[first - 1])
        level = level_within(wanted, limit_ms, line)
        if totals[first - 1] < totals[first] and level is not None and level < totals[first]:
            return max(totals[first - 1], level)
    return None


def level_within(wanted: Collection[OwnerRows], limit_ms: float, line: StepLine) -> int | None:
    """Return the highest level, at least 1, that keeps the step within `limit_ms`, as if decode and
    prompt rows were cut in equal parts; None if the step keeps it without a cut.
    """
    decoding = sum(rows.decoding for rows in wanted)
    prompt = sum(rows.prompt for rows in wanted)
    spent_ms = line.ms(decoding, prompt) - line.fixed
    if line.fixed + spent_ms <= limit_ms:
        return None
    left = max(0.0, limit_ms - line.fixed) / spent_ms * (decoding + prompt)  # rows
    totals = sorted(rows.total for rows in wanted)
    for at, total in enumerate(totals):
        level = int(left / (len(totals) - at))
        if level < total:
            return max(1, level)
        left -= total
    return None


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
        """Record the time of a step."""
        self._cost.observe(batch.context.decoding, batch.context.prefill_rows, ms)
        fade = math.exp(-ms / MEMORY_MS)
        self._all_ms = self._all_ms * fade + ms
        used = {owner: before * fade for owner, before in self._used_ms.items()}
        for owner in batch.owners:
            used[owner] = used.get(owner, 0.0) + ms
        least = FORGOTTEN * self._all_ms
        self._used_ms = {owner: each for owner, each in used.items() if each > least}

    def expected(self) -> int:
        """Count the owners without running sequences that are waiting or had work recently."""
        return len((self._used_ms.keys() | self._waiting.owners) - self._running.owners.keys())

    def cuts(self) -> dict[str, OwnerRows]:
        """Return the rows in the next step of each owner that is cut."""
        owners = self._running.owners.keys() | self._waiting.owners
        if len(owners) < 2 and self._used_ms.keys() <= owners:
            return {}
        wanted = self._wanted()
        absent_ms = sum(used for owner, used in self._used_ms.items() if owner not in wanted)
        if not wanted:
            return {}
        used = [self._used_ms.get(owner, 0.0) / (self._all_ms or 1.0) for owner in wanted]
        line = self._cost.line()
        found = [fair_level(wanted.values(), used, line)]
        if absent_ms:
            longest = max(SHORT, self._all_ms / absent_ms / 2)
            found.append(level_within(wanted.values(), longest * line.ms(1, 0), line))
        level = min((each for each in found if each is not None), default=None)
        if level is None:
            return {}
        return {owner: rows.cut(level) for owner, rows in wanted.items() if rows.total > level}

    def in_turn(self, cuts: Mapping[str, OwnerRows]) -> list[Sequence]:
        """Return the decoding sequences for the next step; those of a cut owner take turns."""
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
        """Return how many of these prompt rows fit in a step that must end within SOON_MS."""
        rows = min(rows, MOST_ROWS)
        line = self._cost.line()
        while rows > FEWEST_ROWS and line.ms(0, rows) > SOON_MS:
            rows //= 2
        return rows

    def settled(self, cuts: Mapping[str, OwnerRows]) -> None:
        """Record that no further sequence can start: an uncut owner without running sequences
        requests no rows while it waits.
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
