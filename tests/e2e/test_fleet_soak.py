"""A fleet of three under one fault after the other: replicas and engines killed or stopped, drains,
pushes by every channel, a gateway killed and started again, also during a push. No response is
lost, and each has the bits of one server with the weights that it names.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle, islice
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import DRAFTING
from tests.e2e.fleets import Apart, moves, ready
from tests.e2e.test_lifecycle import FAST_START
from tests.e2e.test_rollouts import ITEMS, LONG
from tests.processes import engine
from tests.waiting import meanwhile, until
from tlt_client import Client, ConnectionFailed, Retries, ServerError
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.http import HttpSender
from tlt_client.wire import Choice, ItemResult, Token
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

REPLICAS, STOPPED_S = 3, 5.0
ASKED = [item for item in ITEMS if item["id"] != "stopped"]  # each request has a stop of its own
Bits = tuple[list[int], list[float], str, str]


def weights_of(version: str) -> str:
    """Return the directory of a version's weights."""
    return "a" if version == "initial" else version[0]


def number_of(version: str) -> int:
    return 0 if version == "initial" else int(version.partition("-")[2])


def bits(choice: Choice) -> Bits:
    return choice.token_ids, choice.logprobs, choice.text or "", choice.finish_reason


def expected(root: Path) -> dict[str, dict[str, list[Bits]]]:
    """Return what one server answers that does not draft, by weights and item."""
    found = {}
    for weights in "ab":
        flags = ("--model", str(root / weights), *FAST_START[2:])
        with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as client:
            results = client.generate(ASKED, sampling=LONG).results
            found[weights] = {
                each.id: [bits(choice) for choice in each.choices] for each in results
            }
    return found


class FleetStorm:
    """The fleet, its load, its faults and what came of them."""

    def __init__(self, replicas: Apart, root: Path) -> None:
        self.seen, self._lock, self._stop = Counter[str](), Lock(), Event()
        self._replicas, self._root, self._draw = replicas, root, random.Random(1)
        self._expected = expected(root)
        self._named, self.committed = set[str](), {"initial"}
        self._pushes = self._restarts = 0  # odd while no gateway runs
        self.gateway = replicas.enter_context(replicas.gateway())
        self.faults: list[Callable[[], None]] = [
            *(self.kill, self.push, self.drain, self.restart, self.stop),
            *(self.push, self.push_over_a_kill, self.end_an_engine, self.push_over_a_restart),
        ]

    def client(self) -> Client:
        return Client(self.gateway.url, timeout_s=60, retries=Retries(times=60, max_s=1.0))

    def run(self, faults: int, every_s: float) -> None:
        with self.client() as client, ThreadPoolExecutor(REPLICAS) as pool:
            ready(client, REPLICAS)
            work = [pool.submit(self._work, self._roll, name) for name in ("x", "y")]
            work.append(pool.submit(self._work, self._stream, "z"))
            try:
                for fault in islice(cycle(self.faults), faults):
                    if not any(each.done() for each in work):
                        self._disturb(fault, every_s)
            finally:
                self._stop.set()
            for each in work:
                each.result(600)
            self._count_moves(client)
        assert self._named <= self.committed, self._named - self.committed

    def _disturb(self, fault: Callable[[], None], every_s: float) -> None:
        """Inject a fault, and wait until all is well again."""
        began_s = time.monotonic()
        print(f"{time.strftime('%T')} {fault.__name__}", file=sys.stderr, flush=True)
        fault()
        self._count(f"fault {fault.__name__}")
        with self.client() as client:
            ready(client, REPLICAS)
            live = client.weights()["target"]
            self.committed.add(live)
            until(lambda: {each.versions["target"] for each in client.fleet().replicas} == {live})
        self._stop.wait(max(0.0, began_s + every_s - time.monotonic()))

    def _count(self, *what: str) -> None:
        with self._lock:
            self.seen.update(what)

    def _count_moves(self, client: Client) -> None:
        with self._lock:
            self.seen.update({f"fleet moves: {why}": n for why, n in moves(client).items()})

    # the load

    def _work(self, ask: Callable[[Client, str], None], name: str) -> None:
        with self.client() as client:
            for number in range(10**9):
                if self._stop.is_set():
                    return
                ask(client, f"{name}-{number}")
                self._stop.wait(0.2)

    def _sampling(self, key: str) -> dict[str, Any]:
        """Return sampling that makes a request another one, and its output the same."""
        return {**LONG, "stop": [f"<{key}>"]}

    def _roll(self, client: Client, key: str) -> None:
        """Ask as a rollout, which no fault may lose."""
        asked = {"sampling": self._sampling(key), "idempotency_key": key}
        rollout = client.generate(ASKED, **asked, detach=True)  # type: ignore[call-overload]
        for result in rollout.result(400).results:
            self._check(result)
        rollout.delete()
        self._count("fleet rollout")

    def _stream(self, client: Client, key: str) -> None:
        """Ask as a stream, which only a gateway's end may cut."""
        tokens, restarts, item = dict[int, list[int]](), self._restarts, ASKED[0]
        try:
            for event in client.stream([item], sampling=self._sampling(key)):
                if isinstance(event, Token):
                    tokens.setdefault(event.index, []).extend(event.token_ids)
                elif isinstance(event, ItemResult):
                    self._check(event)
                    assert [choice.token_ids for choice in event.choices] == [
                        tokens[choice.index] for choice in event.choices
                    ], "a token was streamed twice, or never"
            self._count("fleet stream")
        except (ConnectionFailed, ServerError):
            if not restarts % 2 and restarts == self._restarts:
                raise
            self._count("fleet stream cut")

    def _check(self, result: ItemResult) -> None:
        """Compare a whole response, of several versions the tokens of the first one."""
        assert result.error is None, result
        for choice in result.choices:
            versions = [span.version for span in choice.weight_versions]
            self._named.update(versions)
            numbers, first = [*map(number_of, versions)], choice.weight_versions[0]
            assert numbers == sorted(set(numbers)), choice.weight_versions
            right = self._expected[weights_of(first.version)][result.id][choice.index]
            if len(versions) == 1:
                assert bits(choice) == right, (result.id, versions)
            else:
                mine = choice.token_ids[: first.end], choice.logprobs[: first.end]
                assert mine == (right[0][: first.end], right[1][: first.end]), (result.id, versions)
            self._count(f"fleet response of {'one version' if len(versions) == 1 else 'several'}")

    # the faults

    def _busy(self) -> str:
        """Return the replica that runs most."""
        with self.client() as client:
            replicas = client.fleet().replicas
        return self._replicas.named(max(replicas, key=lambda each: each.running).address)

    def kill(self) -> None:
        name = self._busy()
        self._replicas.servers[name].process.kill()
        self._replicas.start(name)

    def end_an_engine(self) -> None:
        os.kill(engine(self._replicas.servers[self._busy()].process.pid), signal.SIGKILL)

    def stop(self) -> None:
        """Stop a replica for longer than the gateway waits for it."""
        process = self._replicas.servers[self._busy()].process
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)

    def drain(self) -> None:
        with self.client() as client:
            name = max(client.fleet().replicas, key=lambda each: each.running).name
            client.drain_replica(name)
            time.sleep(1.0)
            client.resume_replica(name)

    def push(self) -> None:
        with self.client() as client:
            self._push(client)

    def _push(self, client: Client) -> None:
        """Push the other weights by the next channel."""
        self._pushes += 1
        weights = "ab"[self._pushes % 2]
        version, directory = f"{weights}-{self._pushes}", self._root / weights
        channel = ("disk", "http", "broadcast")[self._pushes % 3]
        if channel == "disk":
            client.update_weights(weights, version)
        elif channel == "http":
            HttpSender(client).push_directory(directory, version)
        else:
            with closing(BroadcastSender(client)) as sender:
                sender.push(load_file(directory / "model.safetensors").items(), version)
        self.committed.add(version)
        self._count(f"fleet push by {channel}")

    def push_over_a_kill(self) -> None:
        self._push_over(self.kill)

    def push_over_a_restart(self) -> None:
        self._push_over(self.restart)

    def _push_over(self, fault: Callable[[], None]) -> None:
        """Push, and inject a fault meanwhile. The push is live on all or on none."""
        with self.client() as client:
            pushed = meanwhile(lambda: self._push(client))
            time.sleep(self._draw.uniform(0, 0.5))
            fault()
            try:
                pushed.result(400)
            except (ConnectionFailed, ServerError) as error:
                self._count(f"fleet push cut: {getattr(error, 'code', 'connection')}")
            if client.weights()["open"]:
                client.abort_weights()

    def restart(self) -> None:
        """Kill the gateway, and start it again at its address."""
        with self.client() as client:
            self._count_moves(client)
        self._restarts += 1
        port = self.gateway.url.rpartition(":")[2]
        self.gateway.process.kill()
        self.gateway.process.wait()
        began_s = time.monotonic()
        self.gateway = self._replicas.enter_context(self._replicas.gateway("--port", port))
        with self.client() as client:
            client.generate([{"prompt": "1+1="}], sampling={"max_tokens": 1})
        took_ms = round(1000 * (time.monotonic() - began_s))
        self.seen["fleet ms until a gateway served"] = max(
            took_ms, self.seen["fleet ms until a gateway served"]
        )
        self._restarts += 1


@contextmanager
def stormy(place: Path) -> Iterator[FleetStorm]:
    for weights in "ab":
        shutil.copytree(TARGET, place / weights)
    perturbed = perturbed_copy(TARGET, place / "perturbed", seed=3) / "model.safetensors"
    perturbed.rename(place / "b" / "model.safetensors")
    pushes = ("--weight-channels", "disk,http,broadcast", "--weight-root", str(place))
    with Apart(place, REPLICAS, *DRAFTING, "--kv-memory-mb", "64", *pushes) as replicas:
        storm = FleetStorm(replicas, place)
        yield storm
        for server in (storm.gateway, *replicas.servers.values()):
            assert server.stop() == 0
            said = "\n".join(server.lines)
            assert "Traceback" not in said and "unexpected_error" not in said, said[-4000:]


@pytest.mark.long
def test_fleet_of_three_has_one_servers_bits_over_each_fault(tmp_path: Path) -> None:
    with stormy(tmp_path) as storm:
        storm.run(len(storm.faults), 0.0)
    assert storm.seen["fleet rollout"] > 2 and storm.seen["fleet moves: lost"] > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_fleet_survives_an_hour_of_faults(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """SOAK_MINUTES: another duration."""
    faults = round(6 * float(os.environ.get("SOAK_MINUTES", "60")))
    with stormy(tmp_path) as storm:
        storm.run(faults, 10.0)
    record_property("counted", json.dumps(storm.seen))  # `benchmarks.record` reads it
    print(dict(sorted(storm.seen.items())), file=sys.stderr)
    assert storm.seen["fleet rollout"] > faults / 6
