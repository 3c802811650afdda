"""Shares of owners (API keys) in a limit, and their turns at a resource, by deficit round robin.

An owner may use a limit alone while no other asks. Its share is the limit divided by the owners
that hold or ask for something; one within its share is admitted alongside greedier ones, until all
together have `OVER` times the limit.

The first owner of the round is served while it has credit, and each service is charged. Without
credit it moves to the end of the round with one more quantum. A cost need not be known before the
service. While two owners both keep waiting, their charges differ by less than `quantum` plus twice
the largest cost of one service, no matter what others request. No clock, no I/O; used in one
thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

OVER = 2  # times a limit: the bound for owners within their shares


def fits(asked: float, limit: float, own: float, taken: float, owners: int) -> bool:
    """Return True if an owner may have this much more. `own`: its part of `taken`; `owners`: those
    that hold or ask for something.
    """
    room = limit if own + asked > limit / owners else OVER * limit
    return taken + asked <= room


def over_share(held: Mapping[str, float], asking: str, asked: float, limit: float) -> str | None:
    """Return the owner that must make room for `asking`: the one that holds most, if that exceeds
    its share and `asking` stays within its own. `held`: by owner. A share is the limit divided by
    the owners that hold or ask for something.
    """
    share = limit / len(held.keys() | {asking})
    owner = max(held, key=held.__getitem__, default=asking)
    return owner if held.get(asking, 0) + asked <= share < held.get(owner, 0) else None


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
