"""One rollout: its request, its progress and its journal. `Rollouts` runs and changes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from tlt_server.errors import NotFound, StorageFailed, TltError
from tlt_server.frontend.generation.batch import RequestBatch
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, Items
from tlt_server.frontend.rollouts.clocks import KeptTime, elapsed_s
from tlt_server.frontend.rollouts.flaws import described, flaw
from tlt_server.frontend.rollouts.journal import Header, Journal, past

Ended = dict[str, FinishedItem | FailedItem]  # by item


class Replayed(NamedTuple):
    length: int  # bytes of the journal's whole records
    items: Items
    ended: Ended
    done: bool  # the journal has its end


class KeptRollout:
    """One batch. While it runs, `items` grow and its journal is open. Its results stay in memory
    until they are fetched, and then only in the file.
    """

    def __init__(self, header: Header, path: Path) -> None:
        self.header, self.path = header, path
        self.item_ids = [item.id for item in header.items]
        self.bytes = 0
        self.tokens = 0
        self.done: KeptTime | None = None
        self.fetched = False
        self.items: Items | None = None
        self.ended: Ended | None = {}
        self.journal: Journal | None = None
        self.written = False  # the file has its end
        self.task: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def status(self) -> Literal["running", "done"]:
        return "running" if self.done is None else "done"

    @property
    def done_s(self) -> float | None:
        """The end on the wall clock; None while it runs."""
        return self.done.wall_s if self.done is not None else None

    @property
    def deadline_s(self) -> float:
        """The deadline on this process's clock."""
        asked_s = self.header.deadline_s - self.header.created_s
        return time.monotonic() + asked_s - elapsed_s(self.header.created)

    def replayed(self, make: Callable[[RequestBatch], Items]) -> Replayed:
        """Make the journal's outputs into items, as when they were live. `NotFound` when the
        rollout has just been forgotten, `StorageFailed` when no server wrote what it holds.
        """
        try:
            said = past(self.path.read_bytes())
        except FileNotFoundError:
            raise NotFound(
                f"the rollout {self.header.id} has just been deleted; send its request again"
            ) from None
        assert said is not None, "its header was whole before"
        reason = flaw(said.header, said.outputs)
        if reason:
            raise StorageFailed(described(said.header, reason))
        deadline_s = self.deadline_s
        items, ended = (
            make(
                RequestBatch(
                    [item.item(deadline_s) for item in self.header.items], False, deadline_s
                )
            ),
            Ended(),
        )
        for output in said.outputs:
            ended |= {
                event.id: event
                for event in items.take([output])
                if isinstance(event, FinishedItem | FailedItem)
            }
        return Replayed(said.length, items, ended, said.end is not None)

    def seal(self) -> None:
        """Close the journal, which has its end."""
        assert self.journal is not None
        self.journal.close()
        self.journal, self.written = None, True

    def count(self) -> tuple[int, int]:
        """Return the items that have ended and the tokens generated so far."""
        if self.done_s is not None:
            return len(self.item_ids), self.tokens
        return len(self.ended or ()), self.items.tokens if self.items is not None else 0

    async def wait(self, wait_s: float | None = None) -> None:
        """Wait until it is done or the time is up. Raise the typed error if it is deleted, or the
        server stops, first.
        """
        await asyncio.wait([self._over], timeout=wait_s)
        if self.is_over:
            self._over.result()

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def over(self, error: TltError | None = None) -> None:
        """Settle the rollout: this process adds nothing more to it."""
        if self.is_over:
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # mark it as retrieved: there may be no waiter
