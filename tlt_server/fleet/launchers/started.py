"""A launcher whose replicas are started here: one task keeps each of them running. `local` and
`ray` differ in that task alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Protocol

from tlt_server.errors import Conflict, NotFound, StartupError
from tlt_server.frontend.link.launching import ReplicaAddress


class KeepReplica(Protocol):
    """Keeps one replica running until cancelled, then ends it."""

    def __call__(
        self, name: str, change: Callable[[ReplicaAddress], None], *, proven: bool
    ) -> Coroutine[Any, Any, None]:
        """`change`: takes its address whenever that changes. `proven`: others run with the same
        flags, so a failed start is tried again instead of ending the fleet.
        """


class StartedReplicas:
    def __init__(self, number: int, keep: KeepReplica, lacking: Callable[[int], str]) -> None:
        """`lacking(n)`: what n replicas need and is not there; empty: they fit."""
        if fault := lacking(number):
            raise StartupError(fault)
        self._number, self._keep, self._lacking = number, keep, lacking
        self._found: Callable[[Sequence[ReplicaAddress]], None] = lambda addresses: None
        self._addresses: dict[str, ReplicaAddress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self._found = found
        self._refused = asyncio.get_running_loop().create_future()
        try:
            for number in range(self._number):
                self._begin(f"r{number}", proven=False)
            await self._refused
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    async def start(self) -> str:
        if fault := self._lacking(len(self._addresses) + 1):
            raise Conflict(fault)
        name = next(name for n in count() if (name := f"r{n}") not in self._addresses)
        self._begin(name)
        return name

    async def stop(self, name: str) -> None:
        await self._end(name)
        del self._addresses[name]
        self._found([*self._addresses.values()])

    async def restart(self, name: str) -> None:
        await self._end(name)
        self._begin(name)

    def _begin(self, name: str, *, proven: bool = True) -> None:
        self._change(ReplicaAddress(name, "", fault="it starts"))
        self._tasks[name] = asyncio.create_task(self._keep(name, self._change, proven=proven))
        self._tasks[name].add_done_callback(self._done)

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            raise NotFound(f"no replica {name!r} runs; GET /fleet lists those that do")
        task.cancel()
        await asyncio.wait({task})
        self._change(self._addresses[name]._replace(link="", fault="it was ended"))

    def _change(self, address: ReplicaAddress) -> None:
        self._addresses[address.name] = address
        self._found([*self._addresses.values()])

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._refused.done():
            self._refused.set_exception(error)
