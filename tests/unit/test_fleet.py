"""A fleet's sequences: where they run, and that each token comes once when replicas come and go."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest
from structlog.contextvars import bound_contextvars, get_contextvars
from structlog.testing import capture_logs

from tests.frontend.fake_engine import INFO
from tests.unit.small_fleet import NoPushes, SmallFleet, check_whole, read, settle
from tests.waiting import in_loop
from tlt_server.errors import Conflict, EngineFailed, NotFound, Unavailable
from tlt_server.frontend.link import fleet as fleet_module
from tlt_server.frontend.link import operating
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.replica import Replica
from tlt_server.wire.commands import LookAtWeights, Pause, Resume, SetPolicy, Submit
from tlt_server.wire.events import WeightReport, WeightState
from tlt_server.wire.kept import OTHERS
from tlt_server.wire.records import StepOutput


@in_loop
async def test_siblings_spread_over_all_replicas() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(30)
    assert fleet.counts == {"a": 10, "b": 10, "c": 10}
    fleet.step(50)
    check_whole(await read(submission))
    assert not fleet.placer.placed


@pytest.mark.parametrize("crash", [True, False])
@in_loop
async def test_sequences_of_a_lost_replica_continue_elsewhere(crash: bool) -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(30)
    fleet.step(7)
    fleet.links["b"].die(None if crash else [])
    for _ in range(60):
        await settle()
        fleet.step(1)
    outputs = await read(submission)
    assert len(outputs) == 30
    check_whole(outputs)
    again = [r for c in fleet.links["a"].commands if isinstance(c, Submit) for r in c.requests]
    assert {len(request.generated) for request in again} >= {0, 7}
    fleet.placer.check()


@in_loop
async def test_late_output_of_the_replica_before_is_dropped() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(1)
    [name] = [name for name, count in fleet.counts.items() if count]
    fleet.step(3)
    link = fleet.links[name]
    late = StepOutput(id=[*link.running][0], token_ids=[9], logprobs=[-1.0], weight_version="v0")
    await fleet.operations.drain(name)
    link.running = {}
    link._give([late])
    fleet.operations.resume(name)
    other = "b" if name == "a" else "a"
    await fleet.operations.drain(other)  # back to the replica that sends its late output once more
    link._give([late])
    fleet.step(47)
    await settle()
    check_whole(await read(submission))
    moved = [r.id for c in link.commands if isinstance(c, Submit) for r in c.requests]
    assert moved == ["0-0.0", "0-0.0~2"]


@in_loop
async def test_drain_empties_a_replica_and_resume_uses_it_again() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(30)
    fleet.step(5)
    await fleet.operations.drain("a")
    assert fleet.counts == {"a": 0, "b": 15, "c": 15}
    state = {each.name: (each.state, each.moves) for each in fleet.operations.status()}
    assert state == {"a": ("draining", 10), "b": ("ready", 0), "c": ("ready", 0)}
    assert fleet.client.replicas.count == 3  # weights are pushed to it, too
    await fleet.operations.drain("a")  # a repeated order changes nothing
    await fleet.operations.drain("b")
    with pytest.raises(Conflict, match="last replica"):
        await fleet.operations.drain("c")
    with pytest.raises(NotFound, match="the fleet has a, b, c"):
        await fleet.operations.drain("d")
    fleet.operations.resume("a")
    more = fleet.submit(3)
    assert fleet.counts["a"] == 3
    for _ in range(50):
        fleet.step(1)
    await settle()
    check_whole(await read(submission))
    check_whole(await read(more))


@in_loop
async def test_sequence_of_two_versions_does_not_move_by_choice() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    fleet.submit(4)
    fleet.step(2)
    old = fleet.links["a"].running.copy()
    fleet.links["a"].version = fleet.links["b"].version = "v1"
    fleet.links["a"].step(1)
    await fleet.operations.drain("a")
    assert fleet.links["a"].running.keys() == old.keys()
    fleet.links["a"].die([])
    await settle()
    assert fleet.counts == {"a": 0, "b": 4}  # when it is lost, it moves


@in_loop
async def test_without_a_replica_sequences_wait_and_requests_are_refused() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(6)
    fleet.step(3)
    for name in "ab":
        fleet.links[name].die([])
    await settle()
    with pytest.raises(Unavailable, match="no replica is left: b: it ended") as refused:
        fleet.submit(1)
    assert refused.value.retry_after_s is not None
    fleet.links["b"].begin()
    for _ in range(60):  # those that were lost twice are tried one by one
        await settle()
        assert fleet.counts["a"] == 0
        fleet.step(1)
    check_whole(await read(submission))


@in_loop
async def test_deadly_request_ends_two_engines_and_no_third() -> None:
    fleet = SmallFleet("abcd")
    await fleet.begin()
    submission = fleet.submit(12)
    fleet.step(4)
    [deadly, *_] = fleet.links["a"].running
    died = 0
    for _ in range(200):
        await settle()
        for link in fleet.links.values():
            if link.up and deadly in {id.partition("~")[0] for id in link.running}:
                link.die()
                died += 1
            elif link.up:
                link.step(1)
    outputs = await read(submission)
    assert died == 2
    error = outputs.pop(deadly)[-1].error
    assert error is not None and error[0] == "poisoned"
    assert len(outputs) == 11
    check_whole(outputs)


@in_loop
async def test_death_that_others_may_have_caused_blames_no_request() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(1)
    for _ in range(4):
        await settle()
        [link] = [each for each in fleet.links.values() if each.running]
        link.die([*link.running, OTHERS])
        link.begin()
    await settle()
    fleet.step(50)
    check_whole(await read(submission))


@in_loop
async def test_joiner_that_differs_is_named_and_gets_nothing() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.operations.scale(3)
    fleet.links["c"].begin(msgspec.structs.replace(INFO, vocab_size=7))
    await settle()
    [status] = [each for each in fleet.operations.status() if each.name == "c"]
    assert status.state == "lost" and "vocab_size is 300 here and 7 there" in status.fault
    fleet.submit(9)
    assert fleet.counts["c"] == 0


@in_loop
async def test_link_does_not_log_the_request_that_started_it() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    fields: list[dict[str, Any]] = []

    async def connect(of: Fleet, member: Member) -> None:
        fields.append(get_contextvars())

    fleet.fleet._connect = connect
    with bound_contextvars(request_id="r"):
        await fleet.operations.scale(3)
    await settle()
    assert fields == [{}]


@in_loop
async def test_joiner_gets_the_pause_and_the_policy_that_stand() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.client.set_policy(SetPolicy("off"), patience_s=5.0)
    await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
    await fleet.operations.scale(3)
    fleet.links["c"].begin()
    await settle()
    kinds = [type(command) for command in fleet.links["c"].commands]
    assert kinds == [Pause, SetPolicy]
    assert fleet.client.info is not None and fleet.client.info.max_running == 3 * INFO.max_running


@pytest.mark.parametrize("answered", [True, False])
@in_loop
async def test_pause_ordered_during_a_join_reaches_the_joiner(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.operations.scale(3)
    pausing = list[asyncio.Task[None]]()

    async def catch_up(replica: Replica) -> None:
        if not pausing:
            pause = fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
            pausing.append(asyncio.ensure_future(pause))
            await settle()

    monkeypatch.setattr(NoPushes, "catch_up", staticmethod(catch_up))
    if not answered:
        fleet.links["a"].send = lambda command: True  # type: ignore[method-assign]
    fleet.links["c"].begin()
    for _ in range(4):
        await settle()
    assert [each.state for each in fleet.operations.status()] == ["ready"] * 3
    assert pausing[0].done() == answered
    assert [type(command) for command in fleet.links["c"].commands] == [Pause]


@in_loop
async def test_pause_that_ends_during_a_join_ends_at_the_joiner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
    await fleet.operations.scale(3)

    async def catch_up(replica: Replica) -> None:
        if fleet.links["c"].commands:  # it has the pause
            await fleet.client.pauses.resume()

    monkeypatch.setattr(NoPushes, "catch_up", staticmethod(catch_up))
    fleet.links["c"].begin()
    for _ in range(4):
        await settle()
    assert [type(command) for command in fleet.links["c"].commands] == [Pause, Resume]


@in_loop
async def test_replica_that_is_back_in_a_pause_gets_the_pause_first() -> None:
    fleet = SmallFleet("a")
    await fleet.begin()
    await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
    fleet.submit(2)
    fleet.links["a"].die([])
    await settle()
    fleet.links["a"].commands.clear()
    fleet.links["a"].begin()
    await settle()
    kinds = [type(command) for command in fleet.links["a"].commands]
    assert kinds[0] is Pause and Submit in kinds


@in_loop
async def test_joiner_that_took_weights_counts_as_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def bring(replica: Replica) -> None:
        replica.reported(WeightReport(id="", state=WeightState(target="v9")))

    fleet = SmallFleet("ab")
    await fleet.begin()
    monkeypatch.setattr(NoPushes, "catch_up", staticmethod(bring))
    await fleet.operations.scale(3)
    fleet.links["c"].begin()
    await settle()
    states = {each.name: each.versions["target"] for each in fleet.operations.status()}
    assert states == {"a": "v0", "b": "v0", "c": "v9"}
    assert "tlt_catch_ups_total 1.0" in fleet.metrics.exposition().text.decode()


@in_loop
async def test_scaling_down_stops_what_is_not_ready_first() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.operations.scale(3)
    await fleet.operations.scale(2)
    await settle()
    assert fleet.orders == ["stop c"]
    await fleet.operations.scale(1)
    await settle()
    assert fleet.orders == ["stop c", "stop b"]


@in_loop
async def test_scaling_down_drains_before_it_stops() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(30)
    fleet.step(1)
    await fleet.operations.scale(2)
    while not fleet.orders:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    [stopped] = {"a", "b", "c"} - fleet.fleet.members.keys()
    assert fleet.orders == [f"stop {stopped}"] and sum(fleet.counts.values()) == 30
    fleet.step(49)
    await settle()
    check_whole(await read(submission))
    fleet.task.cancel()
    with suppress(asyncio.CancelledError):
        await fleet.task


@in_loop
async def test_what_is_submitted_during_a_commit_waits_for_its_end() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    await fleet.fleet.fan_out.committing.acquire()
    submission = fleet.submit(3)
    assert sum(fleet.counts.values()) == 0
    fleet.fleet.fan_out.committing.release()
    await settle()
    fleet.step(50)
    check_whole(await read(submission))


@in_loop
async def test_gateway_that_every_replica_refuses_ends_and_says_why() -> None:
    fleet = SmallFleet("ab")
    running = asyncio.create_task(fleet.fleet.run())
    await settle()
    for name in "ab":
        fleet.links[name].die([], Conflict(f"{name}:1: the server is held by another"))
    assert (await running).message.endswith(
        "a:1: the server is held by another; b:1: the server is held by another"
    )


@in_loop
async def test_waiting_sequences_move_to_a_replica_with_room() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(60)
    for name in "ab":
        fleet.links[name].waits = 30 - INFO.max_running
    fleet.step(1)
    await fleet.operations.scale(3)
    fleet.links["c"].begin()
    await settle()
    fleet.operations.rearrange(1.0)
    assert fleet.counts["c"] == INFO.max_running
    fleet.placer.check()
    moved = fleet.links["c"].running.values()
    assert all(done == 0 for _, done in moved)  # those that had not started
    for name in "ab":
        fleet.links[name].waits = 0
    for _ in range(50):
        fleet.step(1)
    await settle()
    check_whole(await read(submission))


@pytest.mark.contains_faults
@in_loop
async def test_replica_that_cannot_catch_up_tries_again() -> None:
    tries: list[str] = []
    errors = [OSError(28, "No space left on device"), Conflict("no other replica has 'v1'")]

    async def catch_up(self: NoPushes, replica: Replica) -> None:
        tries.append(replica.name)
        if replica.name == "b" and errors:
            raise errors.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoPushes, "catch_up", catch_up)
        patch.setattr(fleet_module, "CATCH_UP_S", 0.0)
        fleet = SmallFleet("ab")
        await fleet.begin()
        await settle()
    assert tries.count("b") == 3
    states = {each.name: each.state for each in fleet.operations.status()}
    assert states == {"a": "ready", "b": "ready"}


@in_loop
async def test_replica_that_dies_as_it_wakes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    member = fleet.fleet.members["b"]
    await fleet.fleet.sleep(member)

    async def catch_up(self: NoPushes, replica: Replica) -> None:
        fleet.links["b"].die([])

    monkeypatch.setattr(NoPushes, "catch_up", catch_up)
    await fleet.fleet.wake()
    assert member.state == "lost" and [*fleet.placer.loads] == ["a"]


@in_loop
async def test_refusal_names_why_no_replica_has_joined() -> None:
    async def catch_up(self: NoPushes, replica: Replica) -> None:
        raise Conflict("no other replica has version 'v1'")

    fleet = SmallFleet("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoPushes, "catch_up", catch_up)
        patch.setattr(fleet_module, "CATCH_UP_S", 0.0)
        await fleet.begin()
        with pytest.raises(Unavailable, match="no replica is ready: a: no other .* 'v1'"):
            fleet.submit(1)
    await settle()
    fleet.submit(1)
    assert fleet.counts == {"a": 1}


@in_loop
async def test_output_that_is_read_after_a_cut_is_dropped() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(2)
    fleet.step(3)
    link = fleet.links["a"]
    late = [
        StepOutput(id=id, token_ids=[9], logprobs=[-1.0], weight_version="v0")
        for id in link.running
    ]
    fleet.fleet.lost(link.replica, "it was silent at the commit")
    link._give(late)
    for _ in range(60):
        await settle()
        fleet.links["b"].step(1)
    check_whole(await read(submission))


@in_loop
async def test_drained_replica_stays_drained_over_a_lost_link() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    await fleet.operations.drain("a")
    fleet.links["a"].die([])
    fleet.links["a"].begin()
    await settle()
    assert fleet.fleet.members["a"].state == "draining"
    submission = fleet.submit(4)
    assert fleet.counts == {"a": 0, "b": 2, "c": 2}
    fleet.operations.resume("a")
    fleet.submit(2)
    assert fleet.counts["a"] == 2
    submission.close()


@in_loop
async def test_restart_of_the_last_replica_is_refused() -> None:
    fleet = SmallFleet("a")
    await fleet.begin()
    with pytest.raises(Conflict, match="last replica"):
        await fleet.operations.restart("a")
    fleet.submit(1)
    assert fleet.counts == {"a": 1} and fleet.orders == []


@in_loop
async def test_scaling_down_ends_a_replica_that_restarts() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    order = asyncio.Lock()  # the launcher takes one order at a time
    start_again, stop = fleet.restart, fleet.stop

    async def in_turn(name: str, give: Callable[[str], Awaitable[None]]) -> None:
        async with order:
            await give(name)

    fleet.restart = partial(in_turn, give=start_again)  # type: ignore[method-assign]
    fleet.stop = partial(in_turn, give=stop)  # type: ignore[method-assign]
    await order.acquire()
    restart = asyncio.create_task(fleet.operations.restart("b"))
    await settle()
    await fleet.operations.scale(1)
    await settle()
    member = fleet.fleet.members["b"]
    order.release()
    await restart
    assert member.drained and member.leaves
    await settle()
    assert fleet.orders == ["restart b", "stop b"] and fleet.names == ["a"]


@in_loop
async def test_replica_that_takes_the_place_of_another_counts() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    ends = asyncio.Event()

    async def stop(name: str) -> None:
        fleet.orders.append(f"stop {name}")
        await ends.wait()

    async def start() -> str:
        fleet.orders.append("start b")
        return "b"

    fleet.stop, fleet.start = stop, start  # type: ignore[method-assign]
    for replicas in (1, 2, 2, 1):
        await fleet.operations.scale(replicas)
        await settle()
    assert fleet.orders == ["stop b", "start b", "stop b"]
    ends.set()


@in_loop
async def test_sequences_leave_a_drained_replica_after_a_commit() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    submission = fleet.submit(4)
    fleet.step(2)
    await fleet.fleet.fan_out.committing.acquire()
    await fleet.operations.drain("a")
    assert fleet.counts == {"a": 2, "b": 2}
    fleet.fleet.fan_out.committing.release()
    fleet.operations.rearrange(1.0)
    assert fleet.counts == {"a": 0, "b": 4}
    submission.close()


@pytest.mark.contains_faults
@in_loop
async def test_order_whose_handling_fails_is_answered_typed() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    with pytest.raises(EngineFailed):  # `NoPushes` fails at any push
        await fleet.client.weights(LookAtWeights("w1"))


@in_loop
async def test_suspects_that_a_drain_moves_stay_on_trial() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(9)
    fleet.step(2)
    fleet.links["a"].die()
    await settle()
    [trying] = [name for name in "bc" if fleet.links[name].replica.queue.trying]
    before = sum(fleet.counts.values())
    await fleet.operations.drain(trying)
    await settle()
    assert sum(fleet.counts.values()) == before + 1  # one is tried elsewhere, the last one waits
    for _ in range(60):
        fleet.step(1)
        await settle()
    check_whole(await read(submission))


@in_loop
async def test_scaling_up_again_keeps_a_replica_that_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operating, "EMPTY_S", 0.0)
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(6)
    for version in ("v0", "v1"):  # sequences of two versions do not move
        for link in fleet.links.values():
            link.version = version
        fleet.step(2)
    await fleet.operations.scale(2)
    await settle()
    assert [each.state for each in fleet.operations.status()].count("draining") == 1
    await fleet.operations.scale(3)
    await settle()
    assert [each.state for each in fleet.operations.status()] == ["ready"] * 3
    assert fleet.orders == [] and fleet.names == ["a", "b", "c"]
    await fleet.operations.scale(2)
    fleet.step(46)
    await settle()
    assert len(fleet.orders) == 1 and len(fleet.names) == 2
    check_whole(await read(submission))


@in_loop
async def test_order_that_the_launcher_refuses_changes_nothing() -> None:
    fleet = SmallFleet()
    await fleet.begin()

    def check(more: int = 0) -> None:
        raise Conflict(f"{more} more do not fit")

    fleet.check = check  # type: ignore[method-assign]
    orders = fleet.operations
    for order in (orders.scale(5), orders.scale(1), orders.restart("a")):
        with pytest.raises(Conflict, match="do not fit"):
            await order
    assert {each.name: each.state for each in orders.status()} == dict.fromkeys("abc", "ready")


@in_loop
async def test_only_a_commit_has_sequences_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, placed = SmallFleet(), list[int]()
    await fleet.begin()

    async def weights(command: LookAtWeights) -> WeightReport:
        return WeightReport(id=command.id, state=WeightState(target="v0"), result="looked")

    fleet.fleet.fan_out.weights = weights  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(fleet.client.sequences, "resume", lambda: placed.append(1))
    await fleet.client.weights(LookAtWeights("1"))
    await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
    assert not placed
    async with fleet.fleet.fan_out.committing:
        fleet.submit(3)
        await settle()
        assert not placed
    await settle()
    assert placed == [1]


@in_loop
async def test_ordered_end_of_a_replica_is_no_error() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    with capture_logs() as logs:
        await fleet.operations.scale(2)
        await settle()
        fleet.links["a"].die([])
    lost = [each["name"] for each in logs if each["event"] == "replica_lost"]
    errors = [each["name"] for each in logs if each["log_level"] == "error"]
    assert lost[-1:] == errors == ["a"] and fleet.orders == ["stop c"]


@in_loop
async def test_members_count_the_sequences_that_they_have() -> None:
    fleet = SmallFleet()
    await fleet.begin()
    submission = fleet.submit(30)
    fleet.step(2)
    fleet.links["b"].die([])
    await fleet.operations.drain("a")
    fleet.submit(4)
    for _ in range(60):
        await settle()
        for member in fleet.fleet.members.values():
            assert member.sequences == len(fleet.client.sequences.at(member))
        fleet.step()
    check_whole(await read(submission))
    assert not any(member.sequences for member in fleet.fleet.members.values())


@in_loop
async def test_only_a_drained_replica_is_left_and_resumed() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.operations.drain("a")
    for name in "ab":
        fleet.links[name].die([])
    fleet.links["a"].begin()
    await settle()
    assert [each.state for each in fleet.operations.status()] == ["draining", "lost"]
    with pytest.raises(Unavailable, match="no replica is left"):
        fleet.submit(1)
    fleet.operations.resume("a")
    submission = fleet.submit(2)
    fleet.step(50)
    check_whole(await read(submission))


@in_loop
async def test_error_without_replicas_names_one_that_is_drained() -> None:
    fleet = SmallFleet("ab")
    await fleet.begin()
    await fleet.operations.drain("a")
    fleet.links["b"].die([])
    await settle()
    with pytest.raises(Unavailable, match=r"no replica is left.*POST /fleet/a/resume"):
        fleet.submit(1)
