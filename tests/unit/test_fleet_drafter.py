"""A fleet trains one drafter: who is given which sequences, and who gets the drafter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.small_fleet import SmallFleet, settle
from tests.waiting import in_loop
from tlt_client import ServerError
from tlt_client.channels import PEER
from tlt_client.errors import Conflict, InvalidRequest
from tlt_client.wire import DrafterSamples
from tlt_server.config import Config
from tlt_server.errors import WeightsRefused
from tlt_server.fleet.drafter import FleetDrafter
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.wire.commands import Manifest, PushWeights, WeightCommand
from tlt_server.wire.events import WeightReport, WeightState
from tlt_server.wire.training import trained_for

NEW = "drafter-v0-1-0123abcd"


class FakeCalls:
    """The HTTP calls of one replica, which has three recorded sequences of its own."""

    def __init__(self, name: str) -> None:
        self.state, self.held_s, self.drafter_version = "idle", None, "d0"
        self.adopted, self.training = 0, "idle"
        self.samples = [f"{name}{i}".encode() for i in range(3)]
        self.taken: list[bytes] = []
        self.fault: Exception | None = None  # raised by every call
        self.closed = False

    async def drafter(self) -> Any:
        if self.fault is not None:
            raise self.fault
        trainer = {"state": self.state, "reason": "", "adopted": self.adopted, "refused": {}}
        version = self.drafter_version
        return {
            "target_version": "v0",
            "training": self.training,
            "trainer": trainer | {"pause_left_s": self.held_s},
            "drafters": [
                {"weight_version": None, "trained_for": None},
                {"weight_version": version, "trained_for": trained_for(version)},
            ],
        }

    async def pause_drafter_training(self, for_s: Any) -> None:
        if self.state != "paused" or self.held_s is not None:  # not by an operator
            self.state, self.held_s = ("paused", for_s) if for_s else ("idle", None)

    async def train_drafter(self) -> None:
        if self.state != "idle":
            raise Conflict("conflict", f"it is {self.state}", status=409)
        self.state = "training"

    async def drafter_samples(self, after: int, *, limit: int) -> DrafterSamples:
        if after > len(self.samples):
            raise InvalidRequest("invalid_request", "earlier ones were removed", status=400)
        data = b"".join(self.samples[after : after + 2])
        after = min(after + 2, len(self.samples))
        return DrafterSamples(data, after, len(self.samples) - after)

    async def add_drafter_samples(self, content: bytes) -> dict[str, int]:
        self.taken.append(content)
        return {"sequences": len(content) // 2}

    async def close(self) -> None:
        self.closed = True


class TrainedFleet(SmallFleet):
    """A fleet whose pushes of drafters reach the fake calls."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__(names)
        self.calls = {f"http://{name}": FakeCalls(name) for name in names}
        self.pushed: list[Manifest] = []
        self.refusal: tuple[str, str] | None = None
        self.fleet.fan_out.weights = self._take  # type: ignore[method-assign,assignment]
        self.session = WeightSession(self.client, stages=True)
        self.drafter = FleetDrafter(
            self.session,
            self.fleet,
            FleetPlan(Config(model=Path()), key="k"),
            lambda url, **_: self.calls[url],  # type: ignore[arg-type,return-value]
        )

    async def _take(self, command: WeightCommand) -> WeightReport:
        if not isinstance(command, PushWeights):
            return WeightReport(id=command.id, state=WeightState(target="v0"), result="looked")
        self.pushed.append(command.manifest)
        version = command.manifest.version
        if self.refusal is None:
            for each in self.calls.values():
                each.drafter_version = version
        return WeightReport(
            id=command.id,
            state=WeightState(target="v0", drafter=version),
            result="committed",
            error=self.refusal,
            role="drafter",
            version=version,
        )

    async def steps(self, *times_s: float) -> None:
        for now_s in times_s:
            await self.drafter.step(now_s)
            await settle()

    def states(self) -> list[str]:
        return [each.state for each in self.calls.values()]


@in_loop
async def test_one_replica_trains_on_all_samples_and_all_get_its_drafter() -> None:
    fleet = TrainedFleet()
    await fleet.begin()
    await fleet.steps(0.0, 6.0)
    a, *others = fleet.calls.values()
    assert fleet.states() == ["training", "paused", "paused"]
    assert b"".join(a.taken) == b"b0b1b2c0c1c2" and not any(each.taken for each in others)
    a.drafter_version, a.adopted = NEW, 1
    await fleet.steps(8.0)
    [pushed] = fleet.pushed
    assert (pushed.role, pushed.channel, pushed.version, pushed.of) == ("drafter", PEER, NEW, "v0")
    assert (pushed.path, pushed.key) == ("http://a", "k")
    assert {each.drafter_version for each in others} == {NEW}
    assert fleet.fleet.members["a"].trains and NEW in fleet.client.versions.own
    await fleet.steps(10.0)
    assert len(fleet.pushed) == 1 and b"".join(a.taken) == b"b0b1b2c0c1c2"
    fleet.calls["http://b"].samples = [b"n0"]  # it has restarted without the earlier ones
    await fleet.steps(12.0, 14.0)
    assert a.taken[-1] == b"n0"


@in_loop
async def test_busy_replica_is_held_unless_its_trainer_has_a_device() -> None:
    fleet = TrainedFleet("ab")
    await fleet.begin()
    await fleet.steps(0.0, 6.0)
    assert fleet.states() == ["training", "paused"]
    fleet.submit(1)
    for link in fleet.links.values():
        link.step()
    busy = next(name for name, count in fleet.counts.items() if count)
    await fleet.steps(8.0, 9.0, 14.0)
    trains = {name: each.state for name, each in fleet.calls.items()}
    assert trains[f"http://{busy}"] == "paused" and sorted(trains.values())[1] == "training"
    for each in fleet.calls.values():
        each.training = "device"
    fleet.submit(4)
    fleet.step()
    await fleet.steps(16.0)
    assert sorted(fleet.states()) == ["paused", "training"]


@in_loop
async def test_silent_or_paused_replica_is_left_alone() -> None:
    fleet = TrainedFleet()
    await fleet.begin()
    a, b, c = fleet.calls.values()
    a.fault = ServerError("forbidden", "it needs operate", status=403)
    b.state = "paused"
    await fleet.steps(0.0, 6.0, 12.0)
    assert (a.state, b.state, b.held_s, c.state) == ("idle", "paused", None, "training")
    await fleet.operations.drain("c")
    a.fault = None
    await fleet.steps(20.0, 26.0)
    assert a.state == "training"


@in_loop
async def test_shared_drafter_waits_for_an_open_weight_update() -> None:
    fleet = TrainedFleet("ab")
    await fleet.begin()
    await fleet.steps(0.0, 6.0)
    fleet.calls["http://a"].drafter_version = NEW
    await fleet.session.begin("all")
    await fleet.steps(8.0, 10.0, 12.0, 14.0)
    assert not fleet.pushed
    await fleet.session.end()
    await fleet.steps(16.0)
    assert [push.version for push in fleet.pushed] == [NEW]


@in_loop
async def test_drafter_refused_by_the_fleet_is_given_up() -> None:
    fleet = TrainedFleet("ab")
    await fleet.begin()
    fleet.refusal = (WeightsRefused.code, "another shape")
    await fleet.steps(0.0, 6.0)
    fleet.calls["http://a"].drafter_version = NEW
    await fleet.steps(*range(8, 20))
    assert len(fleet.pushed) == 3
    assert fleet.calls["http://b"].drafter_version == "d0"


@in_loop
async def test_memory_is_bounded_by_the_replicas_there_are() -> None:
    fleet = TrainedFleet()
    await fleet.begin()
    await fleet.steps(0.0, 6.0)
    old = [*fleet.calls.values()]
    for name, port in (("b", 1), ("b", 2), ("c", 3)):  # restarts give them other addresses
        url = fleet.fleet.members[name].url = f"http://{name}:{port}"
        fleet.calls[url] = FakeCalls(name)
        await fleet.steps(8.0 + port)
    assert [each.closed for each in old] == [False, True, True]
    assert fleet.calls["http://b:1"].closed and not fleet.calls["http://b:2"].closed
    await fleet.stop("b")
    await fleet.steps(20.0)
    known = fleet.drafter
    assert {*known._clients} == {"http://a", "http://c:3"} and {*known._after} == {("c", "a")}


@in_loop
async def test_end_of_the_gateway_closes_its_connections() -> None:
    fleet = TrainedFleet("ab")
    await fleet.begin()
    await fleet.steps(0.0)
    running = asyncio.create_task(fleet.drafter.run())
    await settle()
    running.cancel()
    await asyncio.wait({running})
    assert all(each.closed for each in fleet.calls.values())
