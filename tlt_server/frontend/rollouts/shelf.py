"""The kept rollouts, running and done: found by id and by key, and bounded in number, bytes and
time after their end.

To make room, done rollouts are deleted early: first fetched ones, the oldest of the greediest key;
then, for a key within its share, unfetched ones of a key above its own. A key within its share is
also admitted if all others' rollouts are running, up to twice the number. Called by `rollouts`, in
the frontend's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tlt_server.errors import QueueFull, StorageFailed
from tlt_server.frontend.rollouts.journal import elapsed_s
from tlt_server.frontend.rollouts.rollout import KeptRollout
from tlt_server.metrics import Metrics
from tlt_server.process.turns import over_share

if TYPE_CHECKING:
    from tlt_server.config import Config

# Rollouts that make way for one new one, at most: above the bound their number falls from one to
# the next, and no request waits until thousands are forgotten.
FORGOTTEN = 4


class Shelf:
    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._max, self._max_bytes = config.max_rollouts, config.max_rollout_mb * 2**20
        self._ttl_s, self._metrics = config.rollout_ttl_s, metrics
        self._by_id: dict[str, KeptRollout] = {}  # in order of creation
        self._by_key: dict[tuple[str, str], KeptRollout] = {}  # by owner and key
        self._bytes = 0

    def __iter__(self) -> Iterator[KeptRollout]:
        return iter(self._by_id.values())

    def get(self, id: str) -> KeptRollout | None:
        return self._by_id.get(id)

    def keyed(self, owner: str, key: str) -> KeptRollout | None:
        return self._by_key.get((owner, key))

    def check_room(self, owner: str) -> None:
        """Make room for one more rollout of this key, or raise `QueueFull`."""
        forgotten = 0
        while len(self._by_id) >= self._max:
            if forgotten == FORGOTTEN:
                return
            held = Counter(rollout.header.owner for rollout in self)
            greedy = over_share(held, owner, 1, self._max)
            if self._make_room(held, greedy):
                forgotten += 1
                continue
            if greedy is not None and len(self._by_id) < 2 * self._max:
                return
            raise QueueFull(
                f"{len(self._by_id)} rollouts are kept, {held[owner]} of them this key's, the "
                f"limit is {self._max} (max_rollouts); fetch or delete finished ones, or wait for "
                "some to end",
                retry_after_s=self._next_expiry_s(),
            )

    def keep(self, rollout: KeptRollout) -> None:
        self._by_id[rollout.header.id] = rollout
        if rollout.header.key:
            self._by_key[rollout.header.owner, rollout.header.key] = rollout
        self.measure()

    def append(self, rollout: KeptRollout, framed: bytes | memoryview) -> None:
        """Write a record, or a part of one, to the rollout's journal, or raise `StorageFailed`."""
        while self._bytes + len(framed) > self._max_bytes:
            held = Counter[str]()
            for kept in self:
                held[kept.header.owner] += kept.bytes
            owner = rollout.header.owner
            if not self._make_room(
                held, over_share(held, owner, len(framed), self._max_bytes), rollout
            ):
                raise StorageFailed(
                    f"the rollouts kept would take {self._bytes + len(framed)} bytes, the limit is "
                    f"{self._max_bytes} (max_rollout_mb); fetch or delete finished ones, or wait",
                    retry_after_s=5,
                )
        assert rollout.journal is not None
        rollout.journal.append(framed)
        self.count(rollout, len(framed))
        self._metrics.rollouts.bytes.set(self._bytes)

    def count(self, rollout: KeptRollout, size: int) -> None:
        """Add bytes of the rollout's journal to the sum."""
        rollout.bytes += size
        self._bytes += size

    def expire_later(self, rollout: KeptRollout) -> None:
        """Delete the rollout when its time after the end is up."""
        assert rollout.done is not None
        left_s = max(0.0, self._ttl_s - elapsed_s(rollout.done))
        rollout.expiry = asyncio.get_running_loop().call_later(left_s, self.forget, rollout)

    def forget(self, rollout: KeptRollout) -> None:
        if rollout.task is not None:
            rollout.task.cancel()
        if rollout.expiry is not None:
            rollout.expiry.cancel()
        self._by_id.pop(rollout.header.id, None)
        if self._by_key.get((rollout.header.owner, rollout.header.key)) is rollout:
            del self._by_key[rollout.header.owner, rollout.header.key]
        self.remove_file(rollout)
        self.measure()

    def remove_file(self, rollout: KeptRollout) -> None:
        if rollout.journal is not None:
            rollout.journal.close()
            rollout.journal = None
        rollout.path.unlink(missing_ok=True)
        self.count(rollout, -rollout.bytes)

    def measure(self) -> None:
        for status in ("running", "done"):
            self._metrics.rollouts.kept.labels(status).set(
                sum(rollout.status == status for rollout in self._by_id.values())
            )
        self._metrics.rollouts.bytes.set(self._bytes)

    def _make_room(
        self, held: Counter[str], greedy: str | None, growing: KeptRollout | None = None
    ) -> bool:
        """Delete one rollout: the oldest fetched one of the key that holds most, or a done one of a
        key that must make room. Return False if there is none.
        """
        done = [each for each in self if each.done_s is not None and each is not growing]
        forgotten = max(
            [each for each in done if each.fetched],
            key=lambda each: held[each.header.owner],
            default=next((each for each in done if each.header.owner == greedy), None),
        )
        if forgotten is not None:
            self.forget(forgotten)
        return forgotten is not None

    def _next_expiry_s(self) -> float:
        """Return the seconds until a done rollout expires; without one, a time after which to ask
        again.
        """
        return min(
            (
                max(1.0, self._ttl_s - elapsed_s(rollout.done))
                for rollout in self
                if rollout.done is not None
            ),
            default=5.0,
        )
