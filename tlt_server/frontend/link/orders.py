"""Commands to several replicas at once, with all their answers, or the error of a replica that is
gone or silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from tlt_server.errors import EngineFailed, TltError, Unavailable, from_code
from tlt_server.frontend.link.merging import FleetCommand, merged
from tlt_server.frontend.link.replica import Replica
from tlt_server.wire.commands import WeightCommand
from tlt_server.wire.events import WeightReport

Given = Mapping[Replica, Any]  # answers: a report, or the error of a replica that is gone
Ask = Callable[[Replica], Coroutine[Any, Any, Any]]


class ReplicaOrders:
    def __init__(self, command_id: Callable[[], str]) -> None:
        """`command_id`: makes the id of each command, since a replica may get several at once."""
        self._command_id = command_id

    async def one(self, replica: Replica, command: FleetCommand) -> Any:
        """Return the report of a replica, or its error."""
        try:
            return await replica.ask(replace(command, id=self._command_id()))
        except TltError as error:
            return error

    async def told(self, replica: Replica, command: WeightCommand) -> WeightReport:
        """Return the report of a replica, or raise the error in it."""
        report: WeightReport = await replica.ask(replace(command, id=self._command_id()))
        if report.error is not None:
            raise from_code(*report.error)
        return report

    async def all(
        self, replicas: Iterable[Replica], command: FleetCommand, within_s: float | None = None
    ) -> Given:
        return await ask_each(replicas, lambda replica: self.one(replica, command), within_s)


async def ask_each(replicas: Iterable[Replica], ask: Ask, within_s: float | None = None) -> Given:
    """Ask these at once. One that is silent for `within_s` counts as gone."""
    tasks = {replica: asyncio.create_task(ask(replica)) for replica in replicas}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=within_s)
    silent = EngineFailed(f"it gave no answer within {within_s} s")
    return {each: task.result() if task.done() else silent for each, task in tasks.items()}


def as_one(command: FleetCommand, answers: Given) -> Any:
    """Return the merged report, see `merged`. `Unavailable` if there was no replica to ask."""
    if not answers:
        raise Unavailable("no replica of the fleet takes commands now", retry_after_s=2)
    return merged(command, {replica.name: each for replica, each in answers.items()})


def refused(answer: Any) -> bool:
    return not isinstance(answer, TltError) and answer.error is not None


def done(answers: Given) -> dict[Replica, Any]:
    """Return the reports of those that have carried out the command."""
    return {
        replica: each
        for replica, each in answers.items()
        if not isinstance(each, TltError) and each.error is None
    }
