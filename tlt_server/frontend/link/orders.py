"""Commands to several replicas at once, with all their answers, or the error of a replica that is
gone or silent. What was begun is done to its end, even if the caller leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from tlt_server.errors import EngineFailed, TltError, Unavailable, from_code
from tlt_server.frontend.link.merging import FleetCommand, merged
from tlt_server.wire.commands import WeightCommand
from tlt_server.wire.events import WeightReport


class FleetReplica(Protocol):
    name: str
    url: str  # address of its HTTP server

    async def ask(self, command: Any) -> Any:
        """Return the report, or raise `TltError` once the replica is gone."""
        ...


Given = Mapping[FleetReplica, Any]  # answers: a report, or the error of a replica that is gone
Ask = Callable[[FleetReplica], Coroutine[Any, Any, Any]]


class ReplicaOrders:
    def __init__(self, command_id: Callable[[], str]) -> None:
        """`command_id`: makes the id of each command, since a replica may get several at once."""
        self._command_id = command_id
        self._tasks: set[asyncio.Future[Any]] = set()

    async def one(self, replica: FleetReplica, command: FleetCommand) -> Any:
        """Return the report of a replica, or its error."""
        try:
            return await replica.ask(replace(command, id=self._command_id()))
        except TltError as error:
            return error

    async def told(self, replica: FleetReplica, command: WeightCommand) -> WeightReport:
        """Return the report of a replica, or raise the error in it."""
        report: WeightReport = await replica.ask(replace(command, id=self._command_id()))
        if report.error is not None:
            raise from_code(*report.error)
        return report

    async def all(
        self, replicas: Iterable[FleetReplica], command: FleetCommand, within_s: float | None = None
    ) -> Given:
        return await self.each(replicas, lambda replica: self.one(replica, command), within_s)

    async def each(
        self, replicas: Iterable[FleetReplica], ask: Ask, within_s: float | None = None
    ) -> Given:
        """Ask these at once. One that is silent for `within_s` counts as gone."""
        tasks = {replica: self.task(ask(replica)) for replica in replicas}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=within_s)
        silent = EngineFailed(f"it gave no answer within {within_s} s")
        return {each: task.result() if task.done() else silent for each, task in tasks.items()}

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do this to its end, even if the caller leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken here, too, since the caller may have left


def as_one(command: FleetCommand, answers: Given) -> Any:
    """Return the merged report, see `merged`. `Unavailable` if there was no replica to ask."""
    if not answers:
        raise Unavailable("no replica of the fleet takes commands now", retry_after_s=2)
    return merged(command, {replica.name: each for replica, each in answers.items()})


def refused(answer: Any) -> bool:
    return not isinstance(answer, TltError) and answer.error is not None


def done(answers: Given) -> dict[FleetReplica, Any]:
    """Return the reports of those that have carried out the command."""
    return {
        replica: each
        for replica, each in answers.items()
        if not isinstance(each, TltError) and each.error is None
    }
