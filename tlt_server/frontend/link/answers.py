"""Commands that wait for the engine's answer. Each gets one answer, or one typed error if none can
arrive any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tlt_server.errors import TltError, Unavailable
from tlt_server.wire.commands import Command, ControlCommand, SetPolicy, WeightCommand
from tlt_server.wire.events import ControlReport, WeightReport


class Changes:
    """Wakes all waiters when some state changes."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event of the next change. A caller that gets it before it reads the state misses no
        change.
        """
        return self._next

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


Report = TypeVar("Report", WeightReport, ControlReport)


class Answers(Generic[Report]):
    """The pending answers of one kind, by the command's id."""

    def __init__(self, send: Callable[[Command], bool]) -> None:
        """`send`: returns whether there is an engine to take the command."""
        self._send = send
        self._awaited: dict[str, asyncio.Future[Report]] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def __contains__(self, id: str) -> bool:
        return id in self._awaited

    async def ask(self, command: WeightCommand | ControlCommand | SetPolicy) -> Report:
        """Send the command and return its answer. The command continues even if the caller
        leaves.
        """
        answer = self._awaited[command.id] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(command):
                raise Unavailable(
                    "the engine does not take commands; poll /readyz", retry_after_s=2
                )
            return await answer
        finally:
            del self._awaited[command.id]

    def settle(self, report: Report) -> None:
        """Give a report to the caller that waits for it, unless that has gone."""
        answer = self._awaited.get(report.id)
        if answer is not None and not answer.done():
            answer.set_result(report)

    def refuse(self, id: str, error: TltError) -> None:
        """End the wait for one answer."""
        answer = self._awaited.get(id)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def fail(self, error: Callable[[], TltError]) -> None:
        """End every wait; `error` makes one error for each."""
        for answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(error())
