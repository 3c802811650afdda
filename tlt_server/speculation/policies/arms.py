"""The strategies of the policy `beg`, by batch size.

TLT groups strategies by their verify rows and maps ranges of batch sizes to groups: 1 / 2 / 5 / 21
requests to 48 / 32 / 16 / 8 rows each on a GPU, and no speculation above 32 requests. On a CPU
extra rows are costly at smaller batches, so its groups are smaller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.wire.records import OFF, Arms, Strategy


class BatchGroup(NamedTuple):
    """A range of batch sizes, up to the start of the next group."""

    start: int  # smallest batch
    rows: int  # verify rows per request; 1: no speculation


GPU_GROUPS = (
    BatchGroup(1, 48),
    BatchGroup(2, 32),
    BatchGroup(5, 16),
    BatchGroup(21, 8),
    BatchGroup(33, 1),
)
CPU_GROUPS = (BatchGroup(1, 8), BatchGroup(3, 5), BatchGroup(12, 3), BatchGroup(33, 1))
GROUPS = {"cpu": CPU_GROUPS, "cuda": GPU_GROUPS, "interpreter": GPU_GROUPS}  # by device


@dataclass(frozen=True)
class Ladder:
    """All arms, OFF first, and the groups of batch sizes."""

    arms: tuple[Strategy, ...]
    groups: tuple[BatchGroup, ...] = CPU_GROUPS

    def within(self, arms: Arms | None) -> Ladder:
        """Return the ladder restricted to these arms, including the strategies that they name."""
        if arms is None:
            return self
        own = (arm for arm in self.arms if arm == OFF or arm.drafter in arms.drafters)
        return replace(self, arms=tuple(dict.fromkeys((*own, *arms.strategies))))

    def group(self, requests: int) -> int:
        """Return the index of the group of a batch size."""
        starts = [group.start for group in self.groups]
        return max(0, bisect_right(starts, requests) - 1)

    def of_group(self, index: int) -> tuple[Strategy, ...]:
        """Return the arms of a group; only OFF if no arm has its number of rows."""
        rows = self.groups[index].rows
        return tuple(arm for arm in self.arms if arm != OFF and arm.rows == rows) or (OFF,)


def ladder(drafters: Iterable[str], device: str = "cpu") -> Ladder:
    """Return OFF and every arm of these drafters on this kind of device."""
    arms = (
        Strategy(name, *rung) for name in drafters for rung in DRAFTERS[name].half(device).rungs
    )
    return Ladder((OFF, *arms), GROUPS[device])
