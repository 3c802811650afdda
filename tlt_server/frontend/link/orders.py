"""Commands to several replicas at once, with all their answers, or the error of a replica that is
gone or silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from tlt_server.errors import EngineFailed, TltError, Unavailable
from tlt_server.frontend.link.members import Member, Order
from tlt_server.frontend.link.merging import merged

Given = Mapping[Member, Any]  # answers: a report, or the error of a replica that is gone
Ask = Callable[[Member], Coroutine[Any, Any, Any]]


async def answer(replica: Member, command: Order) -> Any:
    """Return the report of a replica, or its error."""
    try:
        return await replica.ask(command)
    except TltError as error:
        return error


async def ask_all(
    replicas: Iterable[Member], command: Order, within_s: float | None = None
) -> Given:
    return await ask_each(replicas, lambda replica: answer(replica, command), within_s)


async def ask_each(replicas: Iterable[Member], ask: Ask, within_s: float | None = None) -> Given:
    """Ask these at once. One that is silent for `within_s` counts as gone."""
    tasks = {replica: asyncio.create_task(ask(replica)) for replica in replicas}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=within_s)
    silent = EngineFailed(f"it gave no answer within {within_s} s")
    return {each: task.result() if task.done() else silent for each, task in tasks.items()}


def as_one(command: Order, answers: Given) -> Any:
    """Return the merged report, see `merged`. `Unavailable` if there was no replica to ask."""
    if not answers:
        raise Unavailable("no replica of the fleet takes commands now", retry_after_s=2)
    return merged(command, {replica.name: each for replica, each in answers.items()})


def refused(answer: Any) -> bool:
    return not isinstance(answer, TltError) and answer.error is not None


def done(answers: Given) -> dict[Member, Any]:
    """Return the reports of those that have carried out the command."""
    return {
        replica: each
        for replica, each in answers.items()
        if not isinstance(each, TltError) and each.error is None
    }
