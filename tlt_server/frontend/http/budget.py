"""The memory that bodies on their way may hold in all.

When it is short, the owner whose bodies hold most loses the one that has gone longest without a
byte. So a caller who sends many bodies and ends none makes room for the others.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class BodyOnItsWay(Protocol):
    def cut(self) -> None:
        """End the wait for the rest of this body, whose bytes no longer count."""


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[
            str, dict[BodyOnItsWay, int]
        ] = {}  # by owner; longest without a byte first
        self._sums: Counter[str] = Counter()  # by owner, without zeros

    @property
    def bytes(self) -> int:
        return self._sums.total()

    def take(self, owner: str, body: BodyOnItsWay, size: int) -> None:
        """Count bytes that have come, and cut bodies, this one perhaps, until all fit."""
        held = self._held.setdefault(owner, {})
        held[body] = held.pop(body, 0) + size
        self._sums[owner] += size
        while self.bytes > self.max_bytes:
            greediest = self._sums.most_common(1)[0][0]
            stalled = next(iter(self._held[greediest]))
            self.release(greediest, stalled)
            stalled.cut()

    def release(self, owner: str, body: BodyOnItsWay) -> None:
        """Count the bytes of this body no more: it is complete or refused."""
        held = self._held.get(owner, {})
        self._sums[owner] -= held.pop(body, 0)
        if not held:
            self._held.pop(owner, None)
            del self._sums[owner]

    def check(self) -> None:
        assert self._sums == {owner: sum(held.values()) for owner, held in self._held.items()}
        assert self.bytes <= self.max_bytes
