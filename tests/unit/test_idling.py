"""Idle replicas of a fleet: when they give their memory back, and when they are woken."""

import asyncio

import pytest

from tests.unit.small_fleet import SmallFleet, check_whole, read, settle
from tests.waiting import in_loop
from tlt_server.frontend.link.fleet import MEMORY
from tlt_server.frontend.link.idling import AWAKE_S, IdleReplicas
from tlt_server.frontend.link.submission import Submission
from tlt_server.wire.commands import Command, LookAtWeights, Sleep, Submit, WakeUp
from tlt_server.wire.events import WeightReport, WeightState

AFTER_S = 60.0


class DozingFleet(SmallFleet):
    """A fleet whose idle replicas sleep, by the test's clock."""

    first: Submission

    def __init__(self, names: str = "abc") -> None:
        super().__init__(names)
        self.now_s = 0.0
        self.idle = IdleReplicas(self.fleet, AFTER_S, clock=lambda: self.now_s)

    async def look(self, seconds: float = AFTER_S) -> None:
        self.now_s += seconds
        await self.idle.look()
        await settle()

    @classmethod
    async def asleep(cls, names: str = "abc", busy: int = 0) -> "DozingFleet":
        """A fleet whose replicas sleep, but those that `busy` sequences keep awake."""
        fleet = cls(names)
        await fleet.begin()
        fleet.first = fleet.submit(busy, 500)
        fleet.step()
        await fleet.look(0.0)
        await fleet.look()
        return fleet

    @property
    def states(self) -> dict[str, str]:
        status = self.operations.status()
        return {each.name: "asleep" if each.asleep else each.state for each in status}

    def orders_to(self, name: str) -> list[Command]:
        return [each for each in self.links[name].commands if isinstance(each, Sleep | WakeUp)]


@in_loop
async def test_replica_sleeps_once_it_was_empty_for_long_enough() -> None:
    fleet = DozingFleet()
    await fleet.begin()
    fleet.submit(1)
    fleet.step()
    [busy] = [name for name, count in fleet.counts.items() if count]
    await fleet.look(0.0)
    await fleet.look(AFTER_S - 1.0)
    assert {*fleet.states.values()} == {"ready"}
    await fleet.look(1.0)
    assert fleet.states == {name: "ready" if name == busy else "asleep" for name in "abc"}
    [order] = {name: fleet.orders_to(name) for name in "abc" if name != busy}.popitem()[1]
    assert isinstance(order, Sleep) and order.memory == MEMORY
    fleet.submit(3, 200)
    assert fleet.counts[busy] == 4, "nothing is placed at a replica that sleeps"
    assert fleet.replicas.count == 3, "trainers count replicas that sleep"


@in_loop
async def test_whole_idle_fleet_sleeps_and_wakes_for_a_request() -> None:
    fleet = await DozingFleet.asleep()
    assert {*fleet.states.values()} == {"asleep"}
    await fleet.look()
    assert {*fleet.states.values()} == {"asleep"}, "nothing is wanted"
    submission = fleet.submit(6)
    await fleet.look(1.0)
    assert {*fleet.states.values()} == {"ready"}
    fleet.step(50)
    check_whole(await read(submission))


@in_loop
async def test_crowded_replica_has_the_others_woken() -> None:
    fleet = await DozingFleet.asleep("ab", busy=1)
    [busy] = [name for name, count in fleet.counts.items() if count]
    fleet.submit(4, 500)
    await fleet.look(1.0)
    assert "asleep" in fleet.states.values(), "five sequences slow each other by little"
    fleet.submit(300, 500)
    await fleet.look(1.0)
    assert {*fleet.states.values()} == {"ready"}
    fleet.submit(100, 500)
    assert fleet.counts[busy] == 305


@in_loop
async def test_woken_replica_stays_awake_for_a_while() -> None:
    fleet = await DozingFleet.asleep("ab", busy=1)
    fleet.idle._after_s = 1.0
    await fleet.fleet.wake()
    woken_s = fleet.now_s
    while "asleep" not in fleet.states.values():
        await fleet.look(1.0)
    assert fleet.now_s - woken_s == pytest.approx(AWAKE_S)


@in_loop
async def test_replicas_are_woken_before_an_order_but_not_by_a_look() -> None:
    fleet = await DozingFleet.asleep("ab")
    asked: list[dict[str, str]] = []

    async def weights(command: LookAtWeights) -> WeightReport:
        asked.append(fleet.states)
        return WeightReport(id=command.id, state=WeightState(target="v0"), result="looked")

    fleet.fleet.fan_out.weights = weights  # type: ignore[method-assign,assignment]
    await fleet.client.weights(LookAtWeights("1"))
    await fleet.client.weights(LookAtWeights("2", checksums=True))
    assert [{*states.values()} for states in asked] == [{"asleep"}, {"ready"}]
    await fleet.look(AWAKE_S)
    await fleet.look()
    assert {*fleet.states.values()} == {"asleep"}
    await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
    assert {*fleet.states.values()} == {"ready"}
    await fleet.look(1000.0)
    assert {*fleet.states.values()} == {"ready"}, "a pause is no idleness"


@in_loop
async def test_order_in_progress_or_other_work_keeps_replicas_awake() -> None:
    fleet = DozingFleet()
    await fleet.begin()
    fleet.fleet.members["a"].trains = True
    fleet.fleet.ordering = 1
    await fleet.look(0.0)
    await fleet.look()
    assert {*fleet.states.values()} == {"ready"}
    fleet.fleet.ordering = 0
    await fleet.look()
    assert fleet.states == {"a": "ready", "b": "asleep", "c": "asleep"}


@in_loop
async def test_replica_that_refuses_to_sleep_is_used_again() -> None:
    fleet = DozingFleet("ab")
    await fleet.begin()
    fleet.links["a"].control_error = ("conflict", "a read is in progress")
    await fleet.look(0.0)
    await fleet.look()
    assert fleet.states == {"a": "ready", "b": "asleep"}
    await fleet.look(AWAKE_S - 1.0)
    assert len(fleet.orders_to("a")) == 1
    fleet.submit(1)
    assert fleet.counts["a"] == 1


@in_loop
async def test_replica_that_does_not_wake_is_lost_and_says_why() -> None:
    fleet = await DozingFleet.asleep("ab", busy=1)
    [asleep] = [name for name, state in fleet.states.items() if state == "asleep"]
    fleet.links[asleep].control_error = ("unavailable", "there is no room")
    waking = asyncio.create_task(fleet.fleet.wake())
    await asyncio.sleep(0)
    assert fleet.replicas.count == 2, "trainers count a replica that wakes"
    await waking
    await settle()
    assert fleet.replicas.count == 1
    status = {each.name: each for each in fleet.operations.status()}[asleep]
    assert status.state == "lost" and "does not wake: there is no room" in status.fault
    fleet.links[asleep].begin()
    await settle()
    assert fleet.states[asleep] == "ready"


@in_loop
async def test_sequences_of_the_last_awake_replica_wake_the_others() -> None:
    fleet = await DozingFleet.asleep("ab", busy=1)
    [busy] = [name for name, count in fleet.counts.items() if count]
    fleet.links[busy].die()
    assert fleet.client.replica.runs, "the fleet goes on, as a replica can be woken"
    await fleet.look(1.0)
    assert fleet.states == {name: "lost" if name == busy else "ready" for name in "ab"}
    fleet.step(499)
    check_whole(await read(fleet.first), 500)


@in_loop
async def test_scaling_down_ends_sleeping_replicas_unwoken() -> None:
    fleet = await DozingFleet.asleep("abc", busy=1)
    asleep = [name for name, state in fleet.states.items() if state == "asleep"]
    await fleet.operations.scale(1)
    await settle()
    assert len(asleep) == 2 and {*fleet.orders} == {f"stop {name}" for name in asleep}
    for name in asleep:
        assert not any(isinstance(each, WakeUp) for each in fleet.orders_to(name))
    fleet.step(500)
    check_whole(await read(fleet.first), 500)


@in_loop
async def test_drain_and_the_end_of_the_gateway_wake_replicas() -> None:
    fleet = await DozingFleet.asleep("ab")
    await fleet.operations.drain("a")
    assert fleet.states == {"a": "draining", "b": "ready"}
    await fleet.look(AWAKE_S)
    await fleet.look()
    assert fleet.states == {"a": "draining", "b": "asleep"}
    fleet.task.cancel()
    await asyncio.wait({fleet.task})
    assert isinstance(fleet.orders_to("b")[-1], WakeUp)
    assert not any(isinstance(each, Submit) for each in fleet.links["b"].commands)


@in_loop
async def test_drain_of_the_only_awake_replica_wakes_another() -> None:
    fleet = await DozingFleet.asleep("ab", busy=1)
    [busy] = [name for name, count in fleet.counts.items() if count]
    await fleet.operations.drain(busy)
    assert fleet.states == {name: "draining" if name == busy else "ready" for name in "ab"}
    assert fleet.counts[busy] == 0
