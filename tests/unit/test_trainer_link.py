"""The frontend starts another trainer process, however the last one ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.waiting import in_loop
from tlt_server.errors import Unavailable
from tlt_server.frontend.link import trainer as links
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.metrics import Metrics
from tlt_server.wire.training import HandedOver, Offer, TrainerState, Verdict


@pytest.mark.parametrize(
    "code", ["print('a warning')", "print('x' * 2**17, flush=True)", "raise SystemExit(3)"]
)
def test_ended_or_silent_trainer_process_is_replaced(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.0)
    asyncio.run(two_processes(code))


async def two_processes(code: str) -> None:
    started = [asyncio.Event() for _ in range(2)]
    launched: list[Process] = []

    async def launch() -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
        launched.append(process)
        started[min(len(launched), 2) - 1].set()
        return process

    running = asyncio.create_task(TrainerLink(launch, Metrics().samples, None).run())
    second = asyncio.create_task(started[1].wait())
    await asyncio.wait({running, second}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert second.done() and not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert all(process.returncode is not None for process in launched)


def test_hung_trainer_process_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENT_S", 0.3)
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.01)
    hung = 'import time; print(\'{"type": "buffer"}\', flush=True); time.sleep(60)'
    launched: list[Process] = []
    second = asyncio.Event()

    async def launch() -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", hung, stdout=PIPE)
        launched.append(process)
        if len(launched) == 2:
            second.set()
        return process

    async def run() -> TrainerLink:
        link = TrainerLink(launch, Metrics().samples, None)
        running = asyncio.create_task(link.run())
        await second.wait()
        running.cancel()
        await asyncio.wait({running})
        return link

    link = asyncio.run(asyncio.wait_for(run(), 240))
    assert link.error == "no report for 0.3 s, so it was ended" and link.restarts == 1
    assert all(process.returncode == -signal.SIGTERM for process in launched)


def test_restart_delay_doubles_until_a_process_lives_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(links, "MAX_DELAY_S", 0.05)

    async def launch() -> Process:
        launches.append(None)
        if len(launches) == 5:
            monkeypatch.setattr(links, "STEADY_S", 0.0)
        raise OSError(8, "Exec format error")

    async def run() -> None:
        running = asyncio.create_task(TrainerLink(launch, Metrics().samples, None).run())
        await until(lambda: len(launches) > 5)
        running.cancel()
        await asyncio.wait({running})

    launches: list[None] = []
    with capture_logs() as said:
        asyncio.run(run())
    gone = [line["again_in_s"] for line in said if line["event"] == "trainer_gone"]
    assert gone[:5] == [0.02, 0.04, 0.05, 0.05, 0.01]


# Each state that a trainer may report, with the way in which its process then goes.
FAULTS = [(state, fault) for state in TrainerState for fault in ("killed", "hung")]


@pytest.mark.slow
@pytest.mark.parametrize(("state", "fault"), FAULTS)
def test_trainer_lost_in_any_state_frees_its_resources(
    state: TrainerState, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are removed, what it had asked for is dropped, its memory counts as given back, and
    the next process is told that an operator has paused it.
    """
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.01)
    work, weights = tmp_path / "work", SlowWeights()
    (work / "candidate-1").mkdir(parents=True)
    code = LOST.replace("STATE", state).replace("FAULT", fault)

    async def launch() -> Process:
        silent_s = 1.0 if fault == "hung" and not processes else 60.0
        monkeypatch.setattr(links, "SILENT_S", silent_s)
        processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", STUB if processes else code, stdin=PIPE, stdout=PIPE
            )
        )
        return processes[-1]

    async def run() -> TrainerLink:
        link = TrainerLink(launch, Metrics().samples, None, work)
        running = asyncio.create_task(link.run(weights=weights))
        await until(lambda: link.spot.state == state and link.phase == "running")
        (work / "candidate-2").mkdir()
        if state == TrainerState.ADOPTING:
            await weights.offered.wait()
        asleep = asyncio.create_task(link.gave_back(1))
        with contextlib.suppress(Unavailable):  # it asks to ask again, or the next process answers
            assert (await link.order("pause")).state == TrainerState.PAUSED
        assert await asleep
        await until(lambda: link.restarts == 1 and link.spot.state == TrainerState.PAUSED)
        running.cancel()
        await asyncio.wait({running})
        return link

    processes: list[Process] = []
    link = asyncio.run(asyncio.wait_for(run(), 30))
    assert [*work.iterdir()] == [] and weights.adopted == []
    assert "signal 9" in link.error if fault == "killed" else "no report for" in link.error


# Reports a state, offers a drafter where it adopts, and at the next order is lost.
LOST = """
import json, os, signal, sys, time
print(json.dumps({"type": "buffer"}))
print(json.dumps({"type": "spot", "state": "STATE"}), flush=True)
if "STATE" == "adopting":
    print(json.dumps({"type": "offer", "directory": "/c", "version": "d2", "target_version": "v1"}))
    sys.stdout.flush()
sys.stdin.readline()
if "FAULT" == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


STUB = """
import json, sys
def say(**message):
    print(json.dumps(message), flush=True)
say(type="buffer")
say(type="offer", directory="/c", version="d2", target_version="v1")
verdict = ""
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "verdict":
        verdict = message["refused"] or "adopted"
    elif message["do"] in ("pause", "hold"):
        held = message["do"] == "hold"
        say(type="spot", answered=message["number"], state="paused", reason=verdict, held=held)
    elif message["do"] == "release":
        say(type="spot", answered=message["number"], reason="released")
    else:
        say(type="offer", directory="/c", version="d3", target_version="v1")
        say(type="spot", answered=message["number"], reason=verdict)
"""


async def stub() -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", STUB, stdin=PIPE, stdout=PIPE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.01)


class SlowWeights:
    """Weights that take an offer once they are told to."""

    def __init__(self) -> None:
        self.offered, self.go_on = asyncio.Event(), asyncio.Event()
        self.adopted: list[str] = []

    async def hand_over(self, directory: Path) -> HandedOver:
        raise AssertionError

    async def adopt(self, offer: Offer) -> Verdict:
        self.offered.set()
        await self.go_on.wait()
        self.adopted.append(offer.version)
        return Verdict(version=offer.version)


@in_loop
async def test_pause_follows_an_open_adoption_and_prevents_the_next(tmp_path: Path) -> None:
    weights = SlowWeights()
    link = TrainerLink(stub, Metrics().samples, None, tmp_path)
    running = asyncio.create_task(link.run(weights=weights))
    await weights.offered.wait()
    pausing = asyncio.create_task(link.order("pause"))
    await asyncio.wait({pausing}, timeout=0.05)
    assert not pausing.done()
    weights.go_on.set()
    report = await pausing
    assert (report.state, report.reason) == ("paused", "adopted")
    await link.order("train")  # here: offer another one
    assert (await link.order("pause")).reason == "paused"
    assert weights.adopted == ["d2"]
    running.cancel()
    await asyncio.wait({running})


LETS_GO = """
import json, sys, time
print(json.dumps({"type": "buffer"}), flush=True)
print(json.dumps({"type": "spot", "slept": 1}), flush=True)
sys.stdin.readline()
"""


@in_loop
async def test_memory_counts_as_released_once_the_trainer_confirms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: asyncio.Queue[Process] = asyncio.Queue()

    async def launch() -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LETS_GO, stdin=PIPE, stdout=PIPE
        )
        launched.put_nowait(process)
        return process

    link = TrainerLink(launch, Metrics().samples, None, tmp_path)
    assert await link.gave_back(1)  # there is no process yet
    running = asyncio.create_task(link.run())
    process = await launched.get()
    assert await link.gave_back(1) and process.returncode is None
    monkeypatch.setattr(links, "RELEASE_S", 0.05)
    assert not await link.gave_back(2)
    monkeypatch.setattr(links, "RELEASE_S", 20)
    waiting = asyncio.create_task(link.gave_back(2))
    process.kill()
    assert await waiting
    running.cancel()
    await asyncio.wait({running})


@in_loop
async def test_only_a_timed_trainer_pause_ends_automatically(tmp_path: Path) -> None:
    weights = SlowWeights()
    weights.go_on.set()
    link = TrainerLink(stub, Metrics().samples, None, tmp_path)
    running = asyncio.create_task(link.run(weights=weights))
    await weights.offered.wait()
    assert link.hold_left_s is None
    assert (await link.hold(3600)).held
    left_s = link.hold_left_s
    assert left_s is not None and 3500 < left_s <= 3600
    await link.order("train")  # here: offer another one, which the pause refuses
    assert (await link.hold(3600)).reason == "paused"
    assert (await link.hold(0)).reason == "released" and link.hold_left_s is None
    await link.hold(3600)
    await link.hold(0.01)  # the last call counts
    await until(lambda: link.spot.reason == "released")
    assert link.hold_left_s is None
    await link.hold(0.01)
    await link.order("pause")
    await asyncio.sleep(0.05)
    assert link.spot.state == "paused"
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("for_s", [None, 3600.0])
@in_loop
async def test_pause_survives_a_trainer_process_restart(
    for_s: float | None, tmp_path: Path
) -> None:
    link = TrainerLink(stub, Metrics().samples, None, tmp_path)
    with pytest.raises(Unavailable):  # no process yet
        await (link.order("pause") if for_s is None else link.hold(for_s))
    running = asyncio.create_task(link.run(weights=SlowWeights()))
    await until(lambda: link.spot.state == "paused")
    assert link.spot.held == (for_s is not None)
    running.cancel()
    await asyncio.wait({running})
