"""The coordinator over HTTP, with servers that carry out what they are asked."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator

import pytest

from tests.unit.fake_servers import FakeServer
from tlt_client import Client
from tlt_server.drafter.coordinate import Coordinator, run
from tlt_server.drafter.peers import Peers
from tlt_server.errors import StartupError


def safetensors(value: float) -> bytes:
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(head)) + head + struct.pack("<f", value)


@pytest.fixture
def fleet() -> Iterator[list[FakeServer]]:
    servers = [FakeServer([b"%d-%d" % (i, j) for j in range(3)]) for i in range(4)]
    yield servers
    for server in servers:
        server.stop()


class Run:
    """A coordinator whose clock is the test's."""

    def __init__(self, servers: list[FakeServer], **options: object) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        given = {"min_idle": 0, "quiet_s": 5.0, "interval_s": 2.0, "gather_mb": 1, **options}
        clients = {server.url: Client(server.url, timeout_s=5.0) for server in servers}
        self.peers = Peers(clients, self.lines.append)
        self.coordinator = Coordinator(
            self.peers,
            argparse.Namespace(**given),
            lambda: self.now_s,
            self._sleep,
            self.lines.append,
        )
        self.on_round = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_round()


def test_a_round_of_one_idle_server_ends_with_one_drafter_on_all(fleet: list[FakeServer]) -> None:
    for server in fleet[1:]:
        server.load = 2
    first, coordinated = fleet[0], Run(fleet)

    def trained() -> None:
        if first.state == "training" and first.taken:
            first.drafter, first.adopted, first.file = "drafter-t0-1", 1, safetensors(7.0)

    coordinated.on_round = trained
    assert coordinated.coordinator.run(once=True) == 0
    assert {server.drafter for server in fleet} == {"drafter-t0-1"}
    assert {server.file for server in fleet} == {safetensors(7.0)}
    others = [sample for server in fleet[1:] for sample in server.samples]
    assert first.taken == others, "each sequence once, none of its own"
    assert [server.state for server in fleet] == ["training", "paused", "paused", "paused"]
    coordinated.coordinator.end()
    assert {server.state for server in fleet} == {"idle"}


def test_training_is_taken_back_and_a_lost_server_is_named_once(fleet: list[FakeServer]) -> None:
    coordinated = Run(fleet)
    coordinated.coordinator.step()
    coordinated.now_s = 6.0
    coordinated.coordinator.step()
    assert fleet[0].state == "training"
    fleet[0].load = 1
    fleet[3].gone = True
    for _ in range(3):
        coordinated.coordinator.step()
    assert fleet[0].state == "paused" and fleet[1].state == "training"
    assert sum("left out" in line for line in coordinated.lines) == 1
    fleet[3].gone = False
    coordinated.coordinator.step()
    assert coordinated.lines.count(f"{fleet[3].url} answers again") == 1


def test_a_server_that_cannot_adopt_is_named(fleet: list[FakeServer]) -> None:
    coordinated, first = Run(fleet[:2]), fleet[0]
    fleet[1].refuses_push = True

    def trained() -> None:
        if first.state == "training":
            first.drafter, first.adopted, first.file = "drafter-t0-1", 1, safetensors(7.0)

    coordinated.on_round = trained
    assert coordinated.coordinator.run(once=True) == 1
    assert fleet[1].drafter == "d0"
    assert f"{fleet[1].url} cannot adopt drafter-t0-1; it keeps its own" in coordinated.lines
    assert any("another shape" in line for line in coordinated.lines)


def test_what_cannot_be_used_is_said() -> None:
    twice = argparse.Namespace(servers=["http://a", "http://a/"], min_idle=0)
    with pytest.raises(StartupError, match="twice"):
        run(twice)
    none = argparse.Namespace(servers=["http://a"], min_idle=1)
    with pytest.raises(StartupError, match="none could ever train"):
        run(none)
