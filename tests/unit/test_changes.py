"""The stream of `/events`: a change wakes those who wait; there is no polling."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tests.waiting import in_loop
from tlt_server.frontend.dialects.operate import changes
from tlt_server.frontend.link.answers import Changes


@in_loop
async def test_who_waits_looks_only_when_something_was_told() -> None:
    told, state, looks = Changes(), ["ready"], 0

    def look() -> str:
        nonlocal looks
        looks += 1
        return state[0]

    async with aclosing(changes(look, told, 60.0)) as stream:
        assert await anext(stream) == "ready"
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.12)
        assert looks == 1, "nothing was told"
        told.tell()
        await asyncio.sleep(0.01)
        assert looks == 2 and not following.done(), "the same state is not sent again"
        state[0] = "draining"
        told.tell()
        assert await following == "draining" and looks == 3


@in_loop
async def test_a_change_while_the_reader_is_slow_is_not_missed() -> None:
    told, state = Changes(), ["ready"]
    async with aclosing(changes(lambda: state[0], told, 60.0)) as stream:
        assert await anext(stream) == "ready"
        state[0] = "paused"  # while the generator stands at its yield
        told.tell()
        assert await asyncio.wait_for(anext(stream), 5) == "paused"


@in_loop
async def test_the_stream_ends_with_its_time() -> None:
    assert [state async for state in changes(lambda: "ready", Changes(), 0.0)] == ["ready"]
    assert [state async for state in changes(lambda: "ready", Changes(), 0.02)] == ["ready"]
