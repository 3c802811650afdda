"""Deficit round robin: owners (API keys) take turns at a shared resource.

The first owner of the round is served while it has credit, and each service is charged. Without
credit it moves to the end of the round with one more quantum. A cost need not be known before the
service. While two owners both keep waiting, their charges differ by less than `quantum` plus twice
the largest cost of one service, no matter what others request. No clock, no I/O; used in one
thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Turns:
    def __init__(self, quantum: float) -> None:
        """`quantum`: the credit of one round, in the unit of `charge`, such as tokens."""
        assert quantum > 0
        self._quantum = quantum
        self._credit: OrderedDict[str, float] = OrderedDict()  # the round, its next owner first
        self._waiting: set[str] = set()  # all of them are in the round; others there have debts

    def __len__(self) -> int:
        """Count the owners that wait."""
        return len(self._waiting)

    def __contains__(self, owner: str) -> bool:
        return owner in self._waiting

    def wait(self, owner: str) -> None:
        """Add the owner at the end of the round, unless it is in it."""
        self._waiting.add(owner)
        self._credit.setdefault(owner, self._quantum)

    def leave(self, owner: str) -> None:
        """Note that the owner has nothing to wait for. A debt stays until rounds have paid it."""
        self._waiting.discard(owner)
        if self._credit.get(owner, 0.0) >= self._quantum:
            del self._credit[owner]

    def order(self) -> Iterator[str]:
        """Yield the waiting owners, starting with the one whose turn it is, then in round order,
        for a caller that cannot serve the first.
        """
        self._advance()
        yield from [owner for owner in self._credit if owner in self._waiting]

    def charge(self, owner: str, cost: float) -> None:
        """Charge a service. It is free while no other owner waits, as it takes from none."""
        if cost > 0 and len(self._waiting) > (owner in self._waiting):
            self._credit[owner] = self._credit.get(owner, self._quantum) - cost

    def _advance(self) -> None:
        """Turn the round until the first owner waits and has credit."""
        while self._waiting:
            owner, credit = next(iter(self._credit.items()))
            if owner in self._waiting and credit > 0:
                return
            self._credit[owner] = min(credit, 0.0) + self._quantum
            self._credit.move_to_end(owner)
            if owner not in self._waiting and self._credit[owner] >= self._quantum:
                del self._credit[owner]

    def check(self) -> None:
        """Assert every invariant."""
        assert self._waiting <= self._credit.keys(), "an owner waits outside of the round"
        assert all(credit <= self._quantum for credit in self._credit.values()), (
            "an owner has saved credit up"
        )
        assert all(
            owner in self._waiting or credit < self._quantum
            for owner, credit in self._credit.items()
        ), "an owner without debt or work is in the round"
