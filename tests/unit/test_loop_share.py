"""Turns at the event loop: bounded work in a pass, and equal shares of keys."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.waiting import in_loop
from tlt_server.frontend.http.slices import PASS_BYTES, LoopShare


@in_loop
async def test_loop_pass_has_bounded_work_and_yields_between_passes() -> None:
    share, passes = LoopShare(), 0
    done_in: Counter[int] = Counter()
    over = False

    async def count() -> None:
        nonlocal passes
        while not over:
            passes += 1
            await asyncio.sleep(0)

    async def work(owner: str) -> None:
        for _ in range(50):
            await share.turn(owner, PASS_BYTES // 4)
            done_in[passes] += 1

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work(f"{i % 3}") for i in range(16)))
    over = True
    await counting
    assert sum(done_in.values()) == 16 * 50
    assert max(done_in.values()) <= 4 + 1


@in_loop
async def test_work_that_fits_in_a_pass_never_waits() -> None:
    share = LoopShare()
    waits = share.turn("a", PASS_BYTES - 1)
    try:
        waits.__await__().send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


@pytest.mark.parametrize("size", [PASS_BYTES, 30 * PASS_BYTES])
@in_loop
async def test_sixteen_streams_delay_a_second_key_by_two_passes(size: int) -> None:
    share = LoopShare()

    async def greedy() -> None:
        while True:
            await share.turn("greedy", size)

    async def small() -> None:
        for _ in range(100):
            await share.turn("small", PASS_BYTES)

    tasks = [asyncio.create_task(greedy()) for _ in range(16)]
    working = asyncio.create_task(small())
    passes = 0
    while not working.done():  # noqa: ASYNC110 (counts passes)
        passes += 1
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passes <= 100 * 3


@in_loop
async def test_cancelled_waiter_takes_no_turn() -> None:
    share = LoopShare()
    await share.turn("a", 10 * PASS_BYTES)
    waiting = [asyncio.create_task(share.turn(owner, 1)) for owner in "abc"]
    await asyncio.sleep(0)
    waiting[1].cancel()
    async with asyncio.timeout(10):
        await waiting[0]
        await waiting[2]
        await share.turn("b", 1)
