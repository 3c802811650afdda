"""Work on thousands of sequences, a piece in each pass of the loop, so that other requests run in
between. Chores run in order, one after the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

PIECE = 256  # members worked on in one pass; on a slow core that takes up to 2 ms

T = TypeVar("T")


class _Chore(NamedTuple):
    members: deque[Any]
    work: Callable[[list[Any]], None]
    end: Callable[[], None]


class Chores:
    def __init__(self) -> None:
        self._chores: deque[_Chore] = deque()

    def add(
        self,
        members: Sequence[T],
        work: Callable[[list[T]], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `work` with all members, at most `PIECE` at once, and then `end`. The first call is
        made now, unless an earlier chore is running.
        """
        self._chores.append(_Chore(deque(members), work, end))
        if len(self._chores) == 1:
            self._go_on()

    def _go_on(self) -> None:
        room = PIECE
        try:
            while self._chores and room > 0:
                members, work, end = self._chores[0]
                few = [members.popleft() for _ in range(min(room, len(members)))]
                room -= len(few)
                if few:
                    work(few)
                if not members:
                    try:
                        end()
                    finally:  # what fails is not tried again for ever
                        self._chores.popleft()
        finally:
            if self._chores:
                asyncio.get_running_loop().call_soon(self._go_on)
