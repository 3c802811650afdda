"""The acceptance guard: it detects that a weight change has made a drafter's drafts useless, and
rests that drafter until weights change again.

It compares the share of requests, per step of this drafter, that accepted at least the first draft;
this share hardly depends on the strategy. Before a change, the share is averaged over recent steps.
After it, a new average starts, until the guard can decide whether the drafter has collapsed. A
policy would notice too, but pays for every trial, and a policy with one strategy never would. Only
drafters with weights are watched: drafts of the others depend on the text. Drafts change no token,
so neither does the guard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.wire.records import OFF, Cycle, Strategy

REMEMBERED = 512  # requests times steps in the average before a change
# Requests times steps after a change: before MIN nothing is decided, after MAX all is well.
MIN_JUDGED, MAX_JUDGED = 64, 1024
SURE = 3.0  # standard errors


class AcceptanceGuard:
    def __init__(self, arms: Sequence[Strategy], collapse: float) -> None:
        """`collapse`: a drafter rests if the ratio of its acceptance after a change to that before
        falls below this; 0: never.
        """
        self._arms, self._collapse = arms, collapse
        self._watched: dict[str, _Drafter] = {
            arm.drafter: _Drafter()
            for arm in arms
            if collapse and arm != OFF and DRAFTERS[arm.drafter].needs_weights
        }
        self.collapses = 0

    def renewed(self) -> None:
        """Wake resting drafters after a weight change, and judge all drafters by new
        observations.
        """
        for drafter in self._watched.values():
            drafter.renewed()

    def permitted(self, strategy: Strategy) -> Strategy:
        """Return the strategy. While its drafter rests, return the largest strategy of a stand-in
        with no more rows, or OFF.
        """
        if strategy.drafter not in self._watched or not self._watched[strategy.drafter].rests:
            return strategy
        return max(
            (
                arm
                for arm in self._arms
                if arm != OFF and DRAFTERS[arm.drafter].can_stand_in and arm.rows <= strategy.rows
            ),
            key=lambda arm: arm.rows,
            default=OFF,
        )

    def observe(self, cycle: Cycle) -> str:
        """Return a log line if a drafter has just collapsed, else an empty string."""
        drafter, context = self._watched.get(cycle.strategy.drafter), cycle.context
        if drafter is None or context.speculable - sum(context.bound.values()) < context.decoding:
            return ""  # some may have taken no drafts
        if not cycle.accepted or not drafter.collapsed(cycle.accepted, self._collapse):
            return ""
        self.collapses += 1
        return (
            f"since weights changed, first drafts of {cycle.strategy.drafter} are accepted for "
            f"{drafter.after:.0%} of requests, before "
            f"for {drafter.before:.0%}; it rests until weights change again"
        )

    def gauges(self) -> Mapping[str, float]:
        return {
            "drafters_resting": float(sum(drafter.rests for drafter in self._watched.values())),
            "drafter_collapses": float(self.collapses),
        }


class _Drafter:
    def __init__(self) -> None:
        self.rests = False
        self.before = 0.0  # share accepted until the change; 0: not known
        self._count, self._hits = 0.0, 0.0  # since then, the older ones fading
        self._judged = True

    @property
    def after(self) -> float:
        return self._hits / self._count if self._count else 0.0

    def renewed(self) -> None:
        if (
            self._count >= MIN_JUDGED and not self.rests
        ):  # else what was known before still is what to expect
            self.before = self.after
        self.rests, self._judged = False, not self.before
        self._count = self._hits = 0.0

    def collapsed(self, accepted: Sequence[int], ratio: float) -> bool:
        self._count += len(accepted)
        self._hits += sum(count > 0 for count in accepted)
        if self._judged:
            fading = min(1.0, REMEMBERED / self._count)
            self._count, self._hits = self._count * fading, self._hits * fading
        elif self._count >= MIN_JUDGED:
            error = math.sqrt(max(self.after * (1 - self.after), 1 / self._count) / self._count)
            self.rests = self.after + SURE * error < ratio * self.before
            self._judged = self.rests or self._count >= MAX_JUDGED
            return self.rests
        return False
