"""A real fleet of two: token for token and bit for bit one server, over kills and pushes."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleets import Apart, busiest, fleet, moves, ready, replica_process
from tests.e2e.gloo_trainer import sums, weights
from tests.e2e.test_lifecycle import FAST_START
from tests.e2e.test_rollouts import (
    ITEMS,
    LONG,
    await_tokens,
    check_same,
    said,
    undisturbed,  # noqa: E402, F401 (a fixture)
)
from tests.waiting import until
from tlt_client import Client, Reply
from tlt_client.channels.broadcast import BroadcastSender
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET


def fleet_of_two(directory: Path) -> ServerProcess:
    pushes = (
        "--weight-channels",
        "disk,http,broadcast",
        "--weight-root",
        str(directory / "weights"),
    )
    return fleet(directory / "state", *FAST_START, *pushes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fleet")
    (place / "weights").mkdir()
    perturbed_copy(TARGET, place / "weights" / "v1", seed=3)
    return place


@pytest.fixture(scope="module")
def running(place: Path) -> Iterator[ServerProcess]:
    with fleet_of_two(place) as running:
        yield running


def test_rollout_over_a_kill_of_a_replica_is_that_of_one_server(
    running: ServerProcess,
    undisturbed: Reply,  # noqa: F811
) -> None:
    with Client(running.url, timeout_s=60) as client:
        ready(client)
        rollout = client.rollout(client.generate(ITEMS, sampling=LONG, detach=True).id)
        await_tokens(rollout, 300)
        busy = busiest(client)
        os.kill(replica_process(running, busy), signal.SIGKILL)
        check_same(rollout.result(400), undisturbed)
        [back] = [each for each in ready(client) if each.name == busy]
        assert back.moves == 0 and moves(client)["lost"] > 0


@pytest.mark.long
def test_each_sequence_moves_at_least_once_and_stays_the_same(running: ServerProcess) -> None:
    items = [{"prompt": f"{i}*3=", "seed": i, "n": 2} for i in range(4)]
    long = {"max_tokens": 700, "ignore_eos": True, "logprobs": 2}
    with Client(running.url, timeout_s=60) as client:
        ready(client)
        expected = client.generate(items, sampling=long).results
        rollout = client.rollout(client.generate(items, sampling=long, detach=True).id)
        await_tokens(rollout, 300)
        client.drain_replica("r0")
        until(lambda: client.fleet().replicas[1].running == 8)
        client.resume_replica("r0")
        before = moves(client)["drained"]
        client.drain_replica("r1")
        until(lambda: moves(client)["drained"] == before + 8)
        assert rollout.fetch().status == "running"
        client.resume_replica("r1")
        assert [*map(said, rollout.result(400).results)] == [*map(said, expected)]


def test_push_is_live_on_all_and_on_a_replica_that_comes_back(
    running: ServerProcess, place: Path
) -> None:
    item = {"prompt": "12*3=", "seed": 13, "n": 2, "sampling": LONG}
    with Client(running.url, timeout_s=60) as client:
        ready(client)
        before = client.generate([item]).results[0]
        client.update_weights("v1", "v1")
        assert {each.versions["target"] for each in ready(client)} == {"v1"}
        shutil.rmtree(place / "state" / "replicas" / "r0" / "weights")  # it asks the other one
        os.kill(replica_process(running, "r0"), signal.SIGKILL)
        until(lambda: client.fleet().replicas[0].state == "lost")
        results = []
        for name in ("r0", "r1"):
            assert {each.versions["target"] for each in ready(client)} == {"v1"}
            client.drain_replica(name)
            results.append(said(client.generate([item]).results[0]))
            client.resume_replica(name)
        assert results[0] == results[1] != said(before)


def test_push_by_a_group_reaches_both_replicas(running: ServerProcess) -> None:
    pushed = weights(7)
    with Client(running.url, timeout_s=60) as client:
        ready(client)
        sender = BroadcastSender(client, bucket_bytes=2**20)
        reply = sender.push(pushed, "g1")
        sender.close()
        assert (reply["state"], reply["lagging"]) == ("committed", {})
        assert {each.versions["target"] for each in ready(client)} == {"g1"}
        live = client.weight_checksums()  # refused if the replicas differ
        assert len(pushed) > 8 and sums(pushed).items() <= live.items()
        assert client.weights()["groups"] == []


def test_killed_gateway_continues_its_rollouts(
    place: Path,
    undisturbed: Reply,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    with fleet_of_two(tmp_path) as first, Client(first.url, timeout_s=60) as client:
        id = client.generate(ITEMS, sampling=LONG, idempotency_key="step-1", detach=True).id
        await_tokens(client.rollout(id), 300)
        first.process.kill()
    with fleet_of_two(tmp_path) as second, Client(second.url, timeout_s=60) as client:
        assert client.generate(ITEMS, sampling=LONG, idempotency_key="step-1", detach=True).id == id
        check_same(client.rollout(id).result(400), undisturbed)


@pytest.mark.long
def test_gateway_serves_soon_where_replicas_outlive_it(
    undisturbed: Reply,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Apart(tmp_path, 2, *FAST_START) as replicas:
        with replicas.gateway() as first, Client(first.url, timeout_s=60) as client:
            id = client.generate(ITEMS, sampling=LONG, detach=True).id
            await_tokens(client.rollout(id), 300)
            first.process.kill()
        began_s = time.monotonic()
        with replicas.gateway() as second, Client(second.url, timeout_s=60) as client:
            client.generate([{"prompt": "1+1="}], sampling={"max_tokens": 1})
            with capsys.disabled():
                print(f"\na gateway served {time.monotonic() - began_s:.1f} s after its start")
            check_same(client.rollout(id).result(400), undisturbed)


@pytest.mark.long
def test_emptied_replicas_of_a_long_tail_sleep(server: ServerProcess, tmp_path: Path) -> None:
    long = {"max_tokens": 3000, "ignore_eos": True}
    items = [{"prompt": f"{i}*3=", "seed": i} for i in range(18)]
    tail = [item | ({"sampling": long} if i < 3 else {}) for i, item in enumerate(items)]
    own, flags = ("--consolidate", "1.04", "--sleep-idle", "3"), (*FAST_START[:-1], "256")
    with Client(server.url, timeout_s=60) as client:
        expected = client.generate(tail, sampling={"max_tokens": 40}).results
    with (
        fleet(tmp_path / "state", *flags, replicas=3, own=own) as gateway,
        Client(gateway.url, timeout_s=60) as client,
    ):
        ready(client, 3)
        rollout = client.generate(tail, sampling={"max_tokens": 40}, detach=True)
        until(lambda: sum(each.asleep for each in client.fleet().replicas) == 2)
        assert rollout.fetch().status == "running" and moves(client)["consolidate"] > 0
        assert [*map(said, rollout.result(400).results)] == [*map(said, expected)]
