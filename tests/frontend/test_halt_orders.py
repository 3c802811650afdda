"""Pauses, resumes, sleeps and wakings sent across each other, with answers late or bad, callers
that go away, and engines that die.

Against a twin of the engine's side: it does commands one after another, in the order in which they
were sent. In every order, once the twin has answered, the frontend knows exactly what it has done,
and a resume and a wake-up at the end make it serve.
"""

import asyncio
import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import in_loop
from tlt_server.errors import EngineFailed, TltError, Unavailable, from_code
from tlt_server.frontend.link.standing import PauseState
from tlt_server.wire.commands import ControlCommand, Memory, Pause, Resume, Sleep, WakeUp
from tlt_server.wire.events import ControlReport

BOTH: list[Memory] = ["kv_cache", "weights"]


class Twin:
    """The engine, and the link to it."""

    def __init__(self) -> None:
        ids = itertools.count()
        self.halt = PauseState(lambda: str(next(ids)), self.ask)
        self.queue: deque[ControlCommand] = deque()
        self.answers: dict[str, asyncio.Future[ControlReport]] = {}
        self.paused, self.asleep, self.gone = False, set[Memory](), False
        self.standing = set[
            str
        ]()  # ids of commands to a new epoch; if they fail, requests are refused all the same

    async def ask(self, command: ControlCommand) -> None:
        if self.gone:
            raise Unavailable("the engine is gone")
        self.queue.append(command)
        answer = self.answers[command.id] = asyncio.get_running_loop().create_future()
        try:
            report = await answer
        finally:
            del self.answers[command.id]
        if report.error is not None:
            raise from_code(*report.error)

    def do(self, *, fails: bool) -> None:
        command = self.queue.popleft()
        fails = fails and command.id not in self.standing
        if not fails:
            match command:
                case Pause():
                    self.paused = True
                case Resume():
                    self.paused = False
                case Sleep(_, memory):
                    self.asleep |= {*memory}
                case WakeUp(_, memory):
                    self.asleep -= {*memory}
        report = ControlReport(command.id, ("conflict", "out of luck") if fails else None)
        self.halt.answered(report)
        if command.id in self.answers and not self.answers[command.id].done():
            self.answers[command.id].set_result(report)

    def die(self) -> None:
        self.gone, self.paused, self.asleep = True, False, set()
        self.queue.clear()
        self.halt.died()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(EngineFailed("the engine died"))

    def live(self) -> None:
        self.gone = False
        standing = self.halt.standing()
        self.standing |= {command.id for command in standing}
        self.queue.extend(standing)

    def check(self) -> None:
        if not self.queue and not self.gone:
            assert (self.halt.paused, self.halt.asleep) == (self.paused, self.asleep)
        for command in self.queue:
            assert not isinstance(command, Pause) or self.halt.paused
            assert not isinstance(command, Sleep) or self.halt.asleep.issuperset(command.memory)


def asked(halt: PauseState, what: str) -> asyncio.Task[None]:
    kind, _, how = what.partition(" ")
    memory: list[Memory] = (
        BOTH if how in ("", "both") else ["weights" if how == "weights" else "kv_cache"]
    )
    return asyncio.ensure_future(
        {
            "pause": lambda: halt.pause("abort", refuse=how == "refusing", clear_cache=False),
            "resume": halt.resume,
            "sleep": lambda: halt.sleep(memory),
            "wake": lambda: halt.wake(memory),
        }[kind]()
    )


STEPS = st.sampled_from(
    [
        *("pause refusing", "pause taking", "resume", "sleep both", "sleep kv"),
        *("sleep weights", "wake both", "wake kv", "wake weights", "do", "do", "do", "fail"),
        *("cancel first", "cancel last", "die", "live"),
    ]
)


@given(st.lists(STEPS, max_size=25))
@settings(deadline=None, max_examples=300)
def test_pause_and_sleep_calls_in_any_order_match_the_engine(steps: list[str]) -> None:
    asyncio.run(story(steps))


async def story(steps: list[str]) -> None:
    twin, callers = Twin(), list[asyncio.Task[None]]()
    for step in [*steps, "live", "resume", "wake both"]:
        open = [caller for caller in callers if not caller.done()]
        if step in ("do", "fail"):
            if twin.queue:
                twin.do(fails=step == "fail")
        elif step == "die":
            twin.die()
        elif step == "live":
            if twin.gone:
                twin.live()
        elif step.startswith("cancel"):
            if open:
                open[0 if step == "cancel first" else -1].cancel()
        else:
            callers.append(asked(twin.halt, step))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        twin.check()
    while twin.queue:
        twin.do(fails=False)
        twin.check()
    for result in await asyncio.gather(*callers, return_exceptions=True):
        assert result is None or isinstance(result, TltError | asyncio.CancelledError)
    assert not twin.paused and not twin.asleep
    twin.halt.check()


@in_loop
async def test_departed_caller_leaves_the_engine_asleep() -> None:
    twin = Twin()
    sleep = asked(twin.halt, "sleep both")
    await asyncio.sleep(0)
    sleep.cancel()
    await asyncio.gather(sleep, return_exceptions=True)
    twin.do(fails=False)
    with pytest.raises(Unavailable, match="kv_cache and weights"):
        twin.halt.check()


@in_loop
async def test_failed_pause_keeps_an_earlier_callers_pause() -> None:
    twin = Twin()
    calls = [asked(twin.halt, "pause refusing"), asked(twin.halt, "pause taking")]
    await asyncio.sleep(0)
    twin.do(fails=True)
    twin.do(fails=False)
    await asyncio.gather(*calls, return_exceptions=True)
    assert twin.halt.paused and not twin.halt.refusing
    twin.halt.check()


@in_loop
async def test_requests_are_refused_while_a_new_epoch_cannot_halt() -> None:
    twin = Twin()
    sleep = asked(twin.halt, "sleep both")
    await asyncio.sleep(0)
    twin.do(fails=False)
    await sleep
    twin.die()
    (told,) = twin.halt.standing()
    twin.halt.answered(ControlReport(told.id, ("engine_failed", "the disk is full")))
    with pytest.raises(Unavailable, match="kv_cache and weights"):
        twin.halt.check()
    twin.gone = False
    wake = asked(twin.halt, "wake both")
    await asyncio.sleep(0)
    twin.do(fails=False)
    await wake
    twin.halt.check()
