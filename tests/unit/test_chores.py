"""Chores: work in pieces, one chore after the other."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import in_loop
from tlt_server.frontend.link.submission import PIECE, Chores


@in_loop
async def test_failed_chore_delays_no_other_and_is_not_retried() -> None:
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    chores, done = Chores(), list[int]()

    def fail() -> None:
        raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        chores.add([1], done.extend, fail)
    chores.add(range(PIECE + 1), lambda few: None, fail)
    chores.add([2], done.extend)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (done, failures) == ([1, 2], ["the end"])
