"""The coordinator over real servers: the idle one is given what the other recorded, and its new
drafter reaches both, bit for bit.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import DRAFTING
from tests.e2e.test_lifecycle import QUESTION
from tests.e2e.test_spot_training import items, status, weakened
from tests.waiting import until
from tlt_client import Client
from tlt_client.channels.http import HttpSender
from tlt_client.client import Rollout
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.drafter.coordinate import Coordinator
from tlt_server.drafter.peers import Peers

OPTIONS = argparse.Namespace(min_idle=1, quiet_s=1.0, interval_s=1.0, gather_mb=8, hold_s=60.0)


@pytest.mark.long
def test_servers_share_samples_and_a_drafter(tmp_path: Path) -> None:
    lines: list[str] = []
    now_s = 0.0
    with ExitStack() as stack:
        clients = {}
        for name in ("a", "b"):
            flags = ["--state-dir", str(tmp_path / name), "--weight-channels", "http"]
            flags += ["--drafter-training", "idle", "--drafter-feature-mb", "16"]
            url = stack.enter_context(ServerProcess(*DRAFTING, *flags)).url
            clients[url] = stack.enter_context(Client(url, timeout_s=60))
        first, second = clients.values()
        item = {"messages": QUESTION, "seed": 5, "n": 3, "sampling": {"max_tokens": 12}}
        second.generate([item])
        until(lambda: second.drafter()["buffer"]["sequences"] == 3)
        until(lambda: first.drafter()["trainer"]["process"] == "running")
        coordinator = Coordinator(
            Peers(clients, lines.append), OPTIONS, lambda: now_s, said=lines.append
        )
        coordinator.step()
        now_s = 2.0
        coordinator.step()
        assert any("trains, with 3 sequences of others" in line for line in lines), lines
        until(lambda: first.drafter()["buffer"]["sequences"] == 3)
        assert second.drafter()["trainer"]["state"] == "paused"
        HttpSender(first).push_directory(DRAFTER, "drafter-initial-1-0123abcd", role="drafter")
        coordinator.step()
        assert second.weights()["drafter"] == "drafter-initial-1-0123abcd", lines
        assert first.weight_checksums() == second.weight_checksums()
        coordinator.end()
        assert second.drafter()["trainer"]["state"] != "paused"


def keeps(client: Client, sequences: int) -> None:
    until(lambda: client.drafter()["buffer"]["sequences"] == sequences)


def runs_trainer(client: Client) -> None:
    until(lambda: status(client)["process"] == "running")


def begin(client: Client, seed: int) -> Rollout:
    """Pause the engine, and let one sequence wait for it."""
    client.pause()
    rollout = client.generate([{**LONG, "seed": seed}], detach=True)
    until(lambda: client.load() == 1)
    return rollout


LONG = {"messages": QUESTION, "sampling": {"max_tokens": 200, "ignore_eos": True}}
PATIENCE_S = 600.0  # for a round of training on a loaded machine


@pytest.mark.soak
def test_idle_server_trains_stops_on_load_and_shares_its_drafter(
    client: Client, tmp_path: Path
) -> None:
    lines: list[str] = []
    expected = [result.choices[0] for result in client.generate(items()).results]
    long = [client.generate([{**LONG, "seed": i}]).results[0].choices[0] for i in range(4)]
    with ExitStack() as stack:
        clients = {}
        for name in "abcd":
            flags = ["--model", str(TARGET), "--drafter", str(weakened(tmp_path / f"weak-{name}"))]
            flags += ["--state-dir", str(tmp_path / name), "--weight-channels", "http"]
            flags += ["--drafter-training", "idle", "--drafter-feature-mb", "128"]
            flags += ["--kv-memory-mb", "64", "--policy", "fixed", "--sd-strategy", "eagle:4x2x8"]
            url = stack.enter_context(ServerProcess(*flags)).url
            clients[url] = stack.enter_context(Client(url, timeout_s=120))
        idle, *busy = clients.values()
        for i, server in enumerate(busy):
            asked = items()[i::3]
            found = [result.choices[0] for result in server.generate(asked).results]
            assert [c.token_ids for c in found] == [c.token_ids for c in expected[i::3]]
            assert [c.logprobs for c in found] == [c.logprobs for c in expected[i::3]]
            keeps(server, len(asked))
        for server in (idle, *busy):
            runs_trainer(server)
        options = argparse.Namespace(
            min_idle=0, quiet_s=0.2, interval_s=0.2, gather_mb=8, hold_s=PATIENCE_S
        )
        coordinator = Coordinator(Peers(clients, lines.append, 60.0), options, said=lines.append)
        stack.callback(coordinator.end)

        def coordinate(condition: Callable[[], object]) -> None:
            give_up = time.monotonic() + PATIENCE_S
            while not condition():
                assert time.monotonic() < give_up, (lines, status(idle))
                coordinator.step()
                time.sleep(0.2)

        # A paused engine keeps its server busy, and leaves the processor to the trainer.
        open_rollouts = [begin(server, i) for i, server in enumerate(busy)]
        coordinate(lambda: status(idle)["state"] in ("training", "evaluating"))
        open_rollouts.append(begin(idle, 3))
        coordinate(lambda: status(idle)["pause_left_s"] is not None)
        assert any("trains no more: 1 sequences are open" in line for line in lines), lines
        idle.resume()
        results = [open_rollouts.pop().result().results[0].choices[0]]
        coordinate(lambda: status(idle)["adopted"])
        for server in busy:
            server.resume()
        results = [rollout.result().results[0].choices[0] for rollout in open_rollouts] + results
        assert [c.token_ids for c in results] == [c.token_ids for c in long]
        assert [c.logprobs for c in results] == [c.logprobs for c in long]
        version = idle.weights()["drafter"]
        assert version.startswith("drafter-initial-")
        coordinate(
            lambda: {server.weights()["drafter"] for server in clients.values()} == {version}
        )
        checksums = [dict(server.weight_checksums()) for server in clients.values()]
        assert checksums[1:] == checksums[:1] * 3
        assert all(status(server)["adopted"] == 0 for server in busy)
