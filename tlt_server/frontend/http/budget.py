"""The bound on bodies on their way: on their memory, and on their places among the requests in
progress.

When memory is short, the owner whose bodies hold most loses the one that has gone longest without a
byte. When places are, so does the owner with most bodies, if that one has stalled; for an owner
beyond its share of the places only a body of its own makes room. So a caller who sends many bodies
and ends none makes room for the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tlt_server.errors import TltError, Unavailable

STALLED_S = 1.0


class BodyOnItsWay(Protocol):
    def cut(self, error: TltError) -> None:
        """End the wait for the rest of this body, which no longer counts."""


class _Held(NamedTuple):
    bytes: int
    since_s: float  # when the last of them came


class BodyBudget:
    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        # By owner; the body that has gone longest without a byte is first.
        self._held: dict[str, dict[BodyOnItsWay, _Held]] = {}
        self._sums: Counter[str] = Counter()  # bytes by owner

    @property
    def bytes(self) -> int:
        return self._sums.total()

    def take(self, owner: str, body: BodyOnItsWay, size: int) -> None:
        """Count bytes that have come, and cut bodies, this one perhaps, until all fit."""
        held = self._held.setdefault(owner, {})
        before = held.pop(body).bytes if body in held else 0
        held[body] = _Held(before + size, self._clock())
        self._sums[owner] += size
        while self.bytes > self._max_bytes:
            self._cut_first_of(
                self._sums.most_common(1)[0][0],
                f"bodies on their way hold {self._max_bytes} bytes, the limit (max_bodies_mb)",
            )

    def make_place(self, owner: str | None = None) -> bool:
        """Cut one body that has stalled, of this owner or else of the one with most, and return
        whether there was one.
        """
        owners = self._held.keys() if owner is None else self._held.keys() & {owner}
        if not owners:
            return False
        owner = max(owners, key=lambda owner: len(self._held[owner]))
        longest = next(iter(self._held[owner].values()))
        if self._clock() - longest.since_s < STALLED_S:
            return False
        self._cut_first_of(owner, "as many requests are in progress as may be (max_connections)")
        return True

    def release(self, owner: str, body: BodyOnItsWay) -> None:
        """Count this body no more: it is complete or refused."""
        held = self._held.get(owner, {})
        if body in held:
            self._sums[owner] -= held.pop(body).bytes
        if not held:
            self._held.pop(owner, None)
            del self._sums[owner]

    def _cut_first_of(self, owner: str, why: str) -> None:
        body = next(iter(self._held[owner]))
        self.release(owner, body)
        body.cut(
            Unavailable(
                f"{why}, and this body was the slowest of the key that sends most: send it later, "
                "or fewer at once",
                retry_after_s=1,
            )
        )

    def check(self) -> None:
        sums = {
            owner: sum(one.bytes for one in held.values()) for owner, held in self._held.items()
        }
        assert self._sums == Counter(sums) and all(self._held.values())
        assert self.bytes <= self._max_bytes
        for held in self._held.values():
            times = [one.since_s for one in held.values()]
            assert times == sorted(times)
