"""The share of each event-loop pass for reading outputs and encoding replies, divided by key.

A task asks before each slice of such work. A slice that does not fit in one pass waits for the next
ones, in turns by key, so one key with many streams cannot take the loop from another. Probes and
small requests never ask, and wait for one pass at most. `watch_turns` samples how long a pass holds
the loop: while it computes, nothing is answered, probes included.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from tlt_server.metrics import Metrics
from tlt_server.process.turns import Turns

# About 2 ms of work on a slow core. More would show in the latency of small requests, which take
# some 15 passes; less would cost passes, of 0.05 ms each.
PASS_BYTES = 64 * 1024

FREED = 128  # members of a list that are freed at once, in about 1 ms on a slow core

Turn = Callable[[int], Awaitable[None]]  # LoopShare.turn for one owner
EVERY_S = 0.005


async def emptied(members: list[Any], turn: Turn) -> None:
    """Empty a list a few members at a time. Freeing the outputs of thousands of sequences at once
    would hold the loop for 30 ms.
    """
    while members:
        del members[-FREED:]
        await turn(PASS_BYTES // 2)


class LoopShare:
    def __init__(self) -> None:
        self._turns = Turns(PASS_BYTES)
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by owner
        self._room = PASS_BYTES  # bytes that may still be worked on in this pass
        self._renewing = False

    def of(self, owner: str) -> Turn:
        return partial(self.turn, owner)

    async def turn(self, owner: str, size: int) -> None:
        """Wait until a slice of work may run. `owner`: name of the key. `size`: bytes of JSON; a
        size above `PASS_BYTES` counts as that, since such a slice is already encoded and only
        copied.
        """
        size = min(size, PASS_BYTES)
        if self._room > 0 and not self._lines:
            self._spend(size)
            return
        granted = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append((granted, size))
        self._turns.wait(owner)
        await granted

    def _spend(self, size: int) -> None:
        self._room -= size
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Start a pass, and grant the work that fits in it."""
        self._renewing = False
        self._room = PASS_BYTES
        while self._room > 0 and self._lines:
            owner = next(self._turns.order())
            line = self._lines[owner]
            granted, size = line.popleft()
            if not granted.done():  # else the task that waited is cancelled
                granted.set_result(None)
                self._turns.charge(owner, size)
                self._spend(size)
            if not line:
                del self._lines[owner]
                self._turns.leave(owner)


async def watch_turns(metrics: Metrics) -> NoReturn:
    """Sample for ever how late a timer is. A hold shorter than the interval may be missed, and the
    measured time of a longer one is too short by up to an interval.
    """
    longest_s = 0.0
    while True:
        due_s = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        held_s = max(0.0, time.perf_counter() - due_s)
        metrics.exchanges.loop_held_s.observe(held_s)
        if held_s > longest_s:
            longest_s = held_s
            metrics.exchanges.loop_held_longest_s.set(held_s)
