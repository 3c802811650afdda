"""The coordinator over HTTP, with servers that carry out what they are asked."""

from __future__ import annotations

import argparse
import json
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.unit.fake_servers import FakeServer
from tests.waiting import until
from tlt_client import Client
from tlt_server.drafter.coordinate import Coordinator, run
from tlt_server.drafter.peers import Peers
from tlt_server.errors import StartupError


def safetensors(value: float) -> bytes:
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(head)) + head + struct.pack("<f", value)


NEW = "drafter-t0-1-0123abcd"


@pytest.fixture
def fleet() -> Iterator[list[FakeServer]]:
    servers = [FakeServer([b"%d-%d" % (i, j) for j in range(3)]) for i in range(4)]
    yield servers
    for server in servers:
        server.stop()


class Run:
    """A coordinator whose clock is the test's."""

    def __init__(
        self,
        servers: list[FakeServer],
        act_s: float = 30.0,
        look_s: float = 30.0,
        **options: object,
    ) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        given = {"min_idle": 0, "quiet_s": 5.0, "interval_s": 2.0, "gather_mb": 1}
        given |= {"hold_s": 60.0, **options}
        clients = {server.url: Client(server.url, timeout_s=30.0) for server in servers}
        self.peers = Peers(clients, self.lines.append, look_s)
        asked, clock = argparse.Namespace(**given), lambda: self.now_s
        self.coordinator = Coordinator(
            self.peers, asked, clock, self._sleep, self.lines.append, act_s
        )
        self.trains: FakeServer | None = None  # it has a drafter as soon as it may train

    def steps(self, *times_s: float) -> None:
        for now_s in times_s:
            self.now_s = now_s
            self.coordinator.step()

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.trains is not None and self.trains.state == "training" and self.trains.taken:
            adopts(self.trains)


def adopts(server: FakeServer) -> None:
    server.drafter, server.adopted, server.file = NEW, 1, safetensors(7.0)


def test_a_round_of_one_idle_server_ends_with_one_drafter_on_all(fleet: list[FakeServer]) -> None:
    for server in fleet[1:]:
        server.load = 2
    first, coordinated = fleet[0], Run(fleet)
    coordinated.trains = first
    assert coordinated.coordinator.run(once=True) == 0
    assert {server.drafter for server in fleet} == {NEW}
    assert {server.file for server in fleet} == {safetensors(7.0)}
    others = [sample for server in fleet[1:] for sample in server.samples]
    assert first.taken == others, "each sequence once, none of its own"
    assert [server.state for server in fleet] == ["training", "paused", "paused", "paused"]
    coordinated.coordinator.end()
    assert [server.state for server in fleet] == ["training", "idle", "idle", "idle"]


def test_load_stops_training_and_lost_server_is_named_once(fleet: list[FakeServer]) -> None:
    coordinated = Run(fleet)
    coordinated.steps(0.0, 6.0)
    assert fleet[0].state == "training"
    fleet[0].load = 1
    fleet[3].gone = True
    coordinated.steps(6.0, 6.0, 6.0)
    assert fleet[0].state == "paused" and fleet[1].state == "training"
    assert sum("left out" in line for line in coordinated.lines) == 1
    fleet[3].gone = False
    coordinated.coordinator.step()
    assert coordinated.lines.count(f"{fleet[3].url} answers again") == 1


def test_server_unable_to_adopt_a_drafter_is_named(fleet: list[FakeServer]) -> None:
    coordinated, first = Run(fleet[:2]), fleet[0]
    fleet[1].refuses_push = True
    coordinated.trains = first
    assert coordinated.coordinator.run(once=True) == 1
    assert fleet[1].drafter == "d0"
    assert f"{fleet[1].url} cannot adopt {NEW}; it keeps its own" in coordinated.lines
    assert any("another shape" in line for line in coordinated.lines)


def test_coordinator_renews_its_pauses_but_not_an_operators(fleet: list[FakeServer]) -> None:
    coordinated = Run(fleet[:3], hold_s=30.0)
    fleet[0].state, fleet[0].held_s = "paused", None
    coordinated.steps(0.0, 6.0, 8.0)
    assert (fleet[0].state, fleet[0].held_s) == ("paused", None)
    assert fleet[1].state == "training" and fleet[2].held_s == 30.0
    fleet[2].state, fleet[2].held_s = "idle", None  # its pause has ended, or it has restarted
    coordinated.coordinator.step()
    assert (fleet[2].state, fleet[2].held_s) == ("paused", 30.0)
    assert [line for line in coordinated.lines if fleet[0].url in line] == [
        f"{fleet[0].url} does not train: its trainer is paused ()"
    ]
    fleet[1].state, fleet[1].held_s = "paused", None  # an operator takes it back
    coordinated.coordinator.step()
    assert (fleet[1].state, fleet[1].held_s) == ("paused", None)
    assert fleet[2].state == "training"
    coordinated.coordinator.end()
    assert [server.state for server in fleet[:3]] == ["paused", "paused", "training"]


def test_slow_or_forbidding_server_blocks_no_other(fleet: list[FakeServer]) -> None:
    coordinated = Run(fleet, look_s=0.5)
    fleet[0].refusal = {"code": "forbidden", "message": "operate is needed", "retryable": False}
    fleet[1].delay_s = 1.5
    fleet[3].junk = True
    coordinated.steps(0.0, 6.0)
    assert fleet[2].state == "training" and fleet[1].state == "idle"
    for server, why in ((0, "operate is needed"), (1, "no answer within 0.5 s"), (3, "KeyError")):
        [line] = [line for line in coordinated.lines if fleet[server].url in line]
        assert "left out" in line and why in line
    coordinated.coordinator.end()


def test_slow_push_delays_no_other_server(fleet: list[FakeServer]) -> None:
    coordinated, first = Run(fleet[:3], act_s=0.3), fleet[0]
    coordinated.steps(0.0, 6.0)
    assert first.state == "training"
    adopts(first)
    fleet[1].slow_push = threading.Event()
    coordinated.coordinator.step()
    assert [server.drafter for server in fleet[:3]] == [NEW, "d0", NEW]
    coordinated.coordinator.step()
    fleet[1].slow_push.set()
    until(lambda: fleet[1].drafter == NEW)
    until(lambda: bool(coordinated.coordinator.step()) and len(shared(coordinated)) == 2)
    assert fleet[1].pushes == 1, "it was asked again while it still took the drafter"
    coordinated.coordinator.end()


def shared(coordinated: Run) -> list[str]:
    return [line for line in coordinated.lines if "has the drafter" in line]


def test_second_coordinator_of_a_fleet_is_reported(fleet: list[FakeServer]) -> None:
    both = [Run(fleet), Run(fleet)]
    for now_s in (0.0, 6.0, 12.0, 18.0):
        fleet[0].load = int(now_s == 12.0)  # the first one moves on, and is held by the second
        for coordinated in both:
            coordinated.steps(now_s)
    named = "against what it was asked here: another tlt drafter coordinate runs"
    assert any(f"{fleet[0].url} trains" in line and named in line for line in both[1].lines)
    for coordinated in both:
        coordinated.coordinator.end()


def test_lone_coordinator_reports_no_second_coordinator(fleet: list[FakeServer]) -> None:
    alone = Run(fleet)
    for step in range(8):
        alone.now_s, fleet[0].load = 6.0 * step, int(step % 3 == 2)
        alone.coordinator.step()
    assert len([line for line in alone.lines if " trains, with" in line]) == 2
    assert not any("another" in line for line in alone.lines)
    alone.coordinator.end()


def test_server_of_a_different_target_is_named_and_left_out(fleet: list[FakeServer]) -> None:
    coordinated, first = Run(fleet[:3]), fleet[0]
    fleet[2].target = "t1"
    coordinated.trains = first
    assert coordinated.coordinator.run(once=True) == 0
    assert [server.drafter for server in fleet[:3]] == [NEW, NEW, "d0"]
    [line] = [line for line in coordinated.lines if fleet[2].url in line]
    assert "its target is t1, and most have t0" in line
    assert fleet[2].state == "idle" and not fleet[2].taken
    fleet[2].target = "t0"
    coordinated.coordinator.step()
    assert fleet[2].drafter == NEW
    assert f"{fleet[2].url} takes part again" in coordinated.lines


def test_unusable_flags_are_refused() -> None:
    good = {"servers": ["http://a"], "min_idle": 0, "hold_s": 30.0, "interval_s": 1.0}
    for wrong, why in (
        ({"hold_s": 2.0}, "longer than two intervals"),
        ({"hold_s": 9e4}, "at most 86400 s"),
        ({"servers": ["http://a", "http://a/"]}, "twice"),
        ({"min_idle": 1}, "none could ever train"),
    ):
        with pytest.raises(StartupError, match=why):
            run(argparse.Namespace(**good | wrong))
