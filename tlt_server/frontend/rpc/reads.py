"""Turns to read a message.

gRPC's core keeps a message in memory from the moment it is asked for until it is whole, and does
not say how much of it has come. So each read counts as the largest message, and only as many run at
once as fit into the budget of bodies. A free turn goes to the key that reads least. While others
wait, the key that reads most loses its longest read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tlt_server.errors import Unavailable

T = TypeVar("T")
OTHERS_S = 1.0  # time that a read may take while another key waits
OWN_S = 5.0  # the same while only its own key does
CHECK_S = 0.25


class _Read(NamedTuple):
    owner: str
    wait: asyncio.Timeout
    began_s: float


class MessageReads:
    def __init__(self, at_once: int) -> None:
        self._free = self.at_once = at_once
        self._reads: list[_Read] = []  # the longest first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, no empty queue
        self._check: asyncio.TimerHandle | None = None

    async def read(self, owner: str, receive: Callable[[], Awaitable[T]]) -> T:
        """Return what `receive` does, after a turn. `Unavailable`: it took too long while others
        waited.
        """
        await self._turn(owner)
        loop, read = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(None) as wait:
                read = _Read(owner, wait, loop.time())
                self._reads.append(read)
                return await receive()
        except TimeoutError:
            raise Unavailable(
                f"{self.at_once} messages are read at once (max_bodies_mb) and others wait, but "
                "this one did not arrive; send it later, or fewer at once",
                retry_after_s=1,
            ) from None
        finally:
            if read is not None:
                self._reads.remove(read)
            self._give_turn()

    async def _turn(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        if self._check is None:
            self._look_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(owner, turn)
            else:
                self._give_turn()
            raise

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Wait no more, so that no read is cut for a caller that has left."""
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _give_turn(self) -> None:
        """Pass a turn on to the owner with the fewest reads, or keep it free."""
        reading = self._reading()
        while self._waiting:
            owner = min(self._waiting, key=lambda owner: reading[owner])
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.done():  # else its caller has left
                turn.set_result(None)
                return
        self._free += 1

    def _look_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)

    def _look(self) -> None:
        """Cut the longest read of the key that reads most, if it is overdue."""
        self._check = None
        if not self._waiting or not self._reads:
            return
        [(most, _)] = self._reading().most_common(1)
        longest = next(read for read in self._reads if read.owner == most)
        allowed_s = OTHERS_S if self._waiting.keys() - {most} else OWN_S
        overdue = asyncio.get_running_loop().time() - longest.began_s >= allowed_s
        if overdue and not longest.wait.expired():
            longest.wait.reschedule(0.0)
        self._look_later()

    def _reading(self) -> Counter[str]:
        return Counter(read.owner for read in self._reads)
