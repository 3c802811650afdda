"""Events of the engine, and the stream of `/events`: a change wakes those who wait."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tests.waiting import in_loop
from tlt_server.frontend.dialects.operate import changes
from tlt_server.frontend.link.answers import Changes
from tlt_server.wire.events import MAX_OUTPUTS, Outputs, of_step
from tlt_server.wire.records import OFF, Cycle, StepContext, StepOutput


@in_loop
async def test_waiting_reader_wakes_only_on_an_event() -> None:
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
async def test_slow_event_reader_misses_no_change() -> None:
    told, state = Changes(), ["ready"]
    async with aclosing(changes(lambda: state[0], told, 60.0)) as stream:
        assert await anext(stream) == "ready"
        state[0] = "paused"  # while the generator stands at its yield
        told.tell()
        assert await asyncio.wait_for(anext(stream), 5) == "paused"


@in_loop
async def test_event_stream_ends_at_its_time_limit() -> None:
    assert [state async for state in changes(lambda: "ready", Changes(), 0.0)] == ["ready"]
    assert [state async for state in changes(lambda: "ready", Changes(), 0.02)] == ["ready"]


def test_step_ending_thousands_is_sent_in_parts_and_counted_once() -> None:
    context = StepContext(1, 0, 1.0, 0)
    cycle = Cycle(context=context, strategy=OFF, rows=1, accepted=(), drafted=0)
    gauges = {"running": 1.0}
    for count, parts in ((0, 1), (1, 1), (MAX_OUTPUTS, 1), (2 * MAX_OUTPUTS + 1, 3)):
        outputs = [StepOutput(id=f"{i}", token_ids=[], logprobs=[]) for i in range(count)]
        told = [*of_step(outputs, gauges, cycle)]
        assert len(told) == parts and all(isinstance(part, Outputs) for part in told)
        assert [output for part in told for output in part.outputs] == outputs
        assert all(len(part.outputs) <= MAX_OUTPUTS for part in told)
        assert [part.cycle for part in told] == [None] * (parts - 1) + [cycle]
        assert all(part.gauges == gauges for part in told)
