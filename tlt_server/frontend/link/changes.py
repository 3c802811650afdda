"""The condition that wakes everyone who waits for the server's state to change."""

from __future__ import annotations

import asyncio


class Changes:
    """Told by the engine client and its pauses, in the frontend's loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event of the next change. Who takes it before a look at the state misses none."""
        return self._next

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
