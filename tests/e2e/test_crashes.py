"""A real server whose engine is killed, stopped, or kills itself: exactly one end for each accepted
request, and a server that goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.conftest import DRAFTING
from tests.e2e.gpu_fault import FAULTY, REPORTED
from tests.e2e.test_lifecycle import FAST_START, LONG, QUESTION, gauge
from tests.processes import engine, engines, ranks
from tests.waiting import meanwhile, until
from tlt_client import Client, ServerError
from tlt_client.wire import Done, ItemResult
from tlt_server.demo import server as demo_server
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Submit
from tlt_server.wire.events import Failed, Ready, decode_event
from tlt_server.wire.records import GenerateRequest, Sampling, encode

AT_ONCE = (
    "--max-restarts",
    "1000",
    "--restart-window-s",
    "1",
)  # every death is the first of its window
ASKED = [{"prompt": f"Compute {i}*4+5.", "seed": i} for i in range(8)]
TOKENS = 80  # the longest request's


def kill_engine(server: ServerProcess, number: int = signal.SIGKILL) -> int:
    pid = engine(server.process.pid)
    os.kill(pid, number)
    return pid


def succeeded(server: ServerProcess, pid: int) -> bool:
    """Another engine runs in the place of that one, which is gone."""
    running = engines(server.process.pid)  # asked once: a killed process dies between two looks
    return bool(running) and pid not in running


class Load:
    """Clients that ask without pause, for whole batches, streams and rollouts; every reply is
    checked against the tokens of an undisturbed run.
    """

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self.url, self.expected = url, expected
        self.ends: Counter[str] = Counter()
        self.accepted = 0
        self.wrong: list[str] = []
        self._serial = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
            assert not thread.is_alive(), "a request never ended"

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        with Client(self.url, timeout_s=120) as client:
            while not self._stop.is_set():
                try:
                    self._ask(client, draw)
                except ServerError as error:
                    if (error.code, error.status) != (
                        "unavailable",
                        503,
                    ) or not error.retry_after_s:
                        self.wrong.append(f"refused: {error}")
                    time.sleep(0.05)
                except Exception as error:  # a connection that breaks is not an end
                    self.wrong.append(f"{type(error).__name__}: {error}")

    def _ask(self, client: Client, draw: random.Random) -> None:
        chosen = draw.sample(range(len(ASKED)), 3)
        items = [{**ASKED[i], "id": str(i), "sampling": self._sampling(draw)} for i in chosen]
        way = draw.randrange(3)
        if way == 0:
            self._check(items, list(client.generate(items).results))
            return
        if way == 1:
            reply = client.generate(items, detach=True).result(120)
            self._check(items, list(reply.results), "poisoned")  # killed when it was on trial
            return
        events = list(client.stream(items))
        if not isinstance(events[-1], Done):
            self.wrong.append("a stream without an end")
        self._check(items, [event for event in events if isinstance(event, ItemResult)])

    def _sampling(self, draw: random.Random) -> dict[str, Any]:
        """A stop string that never comes makes each request another one, so that none but a rollout
        runs at two crashes.
        """
        return {
            "max_tokens": draw.randint(10, TOKENS),
            "ignore_eos": True,
            "stop": [f"<{next(self._serial)}>"],
        }

    def _check(self, items: list[Any], results: list[Any], allowed: str = "engine_failed") -> None:
        """`allowed`: code of the only error that a kill may end them with."""
        self.accepted += len(items)
        if sorted(result.id for result in results) != sorted(item["id"] for item in items):
            self.wrong.append(
                f"asked for {[item['id'] for item in items]}, "
                f"ended {[result.id for result in results]}"
            )
        lengths = {item["id"]: item["sampling"]["max_tokens"] for item in items}
        for result in results:
            if result.error is not None:
                self.ends[result.error.code] += 1
                if result.error.code != allowed or result.choices:
                    self.wrong.append(f"{result.error}")
                continue
            self.ends["completed"] += 1
            if result.choices[0].token_ids != self.expected[int(result.id)][: lengths[result.id]]:
                self.wrong.append(f"other tokens for {result.id}")


def kill_under_load(kills: int, *flags: str) -> dict[str, int]:
    """Kill the engine or one of its other ranks, most times under load, else while it starts.
    Return the kills, and how many requests ended in which way.
    """
    with ServerProcess(*flags, *AT_ONCE) as server, Client(server.url, timeout_s=60) as client:
        undisturbed = client.generate(
            ASKED, sampling={"max_tokens": TOKENS, "ignore_eos": True}
        ).results
        expected = [result.choices[0].token_ids for result in undisturbed]
        free, draw, lives = gauge(client, "tlt_pages_free"), random.Random(0), list[list[int]]()
        with Load(server.url, expected) as load:
            for _ in range(kills):
                if not lives or draw.random() < 0.8:
                    until(client.is_ready)
                    completed = load.ends["completed"]
                    until(lambda: load.ends["completed"] > completed)  # noqa: B023
                    time.sleep(draw.uniform(0, 0.2))
                else:
                    time.sleep(draw.uniform(0, 3))
                pid = engine(server.process.pid)
                lives.append([pid, *ranks(pid)])
                os.kill(draw.choice(lives[-1]), signal.SIGKILL)
                until(lambda: succeeded(server, pid))  # noqa: B023
            until(client.is_ready)
        assert load.wrong == []
        assert load.accepted == sum(load.ends.values())
        assert load.ends["poisoned"] < kills, "a life has one trial at a time"
        assert load.ends["completed"] >= kills and load.ends["engine_failed"] > kills / 2, load.ends
        assert server.process.poll() is None and len(engines(server.process.pid)) == 1
        restarts = re.findall(r"^tlt_engine_restarts_total{.+} (.+)$", client.metrics(), re.M)
        assert len({pid for pid, *_ in lives}) == kills == sum(map(float, restarts))
        again = client.generate(ASKED, sampling={"max_tokens": TOKENS, "ignore_eos": True}).results
        assert [result.choices[0].token_ids for result in again] == expected
        until(
            lambda: (
                look(client).open == look(client).running == 0
                and gauge(client, "tlt_pages_free") == free
            )
        )
        assert server.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for life in lives for pid in life)
    return {"kill under load": kills} | {f"end {how}": count for how, count in load.ends.items()}


def test_a_kill_under_load_leaves_every_request_with_one_end() -> None:
    kill_under_load(1, *FAST_START)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills_leave_every_request_with_one_end(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("counted", json.dumps(kill_under_load(100, *FAST_START)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_kills_of_a_rank_leave_each_request_with_one_end(
    record_property: Callable[[str, object], None],
) -> None:
    ranks = ("--device", "cpu", "--tensor-parallel", "2")
    record_property("counted", json.dumps(kill_under_load(50, *DRAFTING, *ranks)))


def outlive_a_gpus_error(
    monkeypatch: pytest.MonkeyPatch, *flags: str, ready_s: float = 60
) -> list[str]:
    """Check what clients see of a server with these flags before, while and after a step ends with
    a GPU's error; return the server's lines.
    """
    program = (
        sys.executable,
        str(Path(__file__).with_name("gpu_fault.py")),
        "serve",
        "--port",
        "0",
    )
    monkeypatch.setattr(demo_server, "COMMAND", program)
    with ServerProcess(*flags, *AT_ONCE) as server, Client(server.url, timeout_s=60) as client:
        asking = meanwhile(lambda: client.generate([{"messages": QUESTION, "n": 3}], sampling=LONG))
        with Client(server.url, timeout_s=60) as other:
            until(lambda: look(other).running == 3)
            [pid], began = engines(server.process.pid), time.monotonic()
            [faulty] = other.generate(
                [{"token_ids": [*FAULTY, 14]}], sampling={"max_tokens": 4}
            ).results
            [bystander] = asking.result(60).results
            for error in (faulty.error, bystander.error):
                assert error is not None
                assert (error.code, error.retryable) == ("engine_failed", True)
                assert re.search("the GPU reported '.+'; the engine restarts", error.message)
                assert "asynchronously" not in error.message
            until(lambda: not Path(f"/proc/{pid}").exists())
            assert time.monotonic() - began < 50, "it did not wait for what cannot be freed"
            until(other.is_ready, within_s=ready_s)
            assert 'tlt_engine_restarts_total{reason="failed"} 1.0' in other.metrics().splitlines()
            assert (
                len(
                    other.generate(ASKED[:1], sampling={"max_tokens": 5, "ignore_eos": True})
                    .results[0]
                    .choices[0]
                    .token_ids
                )
                == 5
            )
        assert server.stop() == 0
        gone = [line for line in server.lines if "engine_gone" in line]
        assert len(gone) == 1 and "the GPU reported" in gone[0]
        return server.lines


@pytest.mark.long
def test_gpu_error_ends_requests_typed_and_restarts_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = outlive_a_gpus_error(monkeypatch, *FAST_START, "--device", "cpu")
    assert any(REPORTED in line for line in lines) and not any("freed" in line for line in lines)


def test_engine_exits_by_itself_after_a_gpu_error(tmp_path: Path) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as commands,
        context.socket(zmq.PULL) as events,
    ):
        commands.bind(f"ipc://{tmp_path}/commands")
        events.bind(f"ipc://{tmp_path}/events")
        events.setsockopt(zmq.RCVTIMEO, 60_000)
        program = [sys.executable, str(Path(__file__).with_name("gpu_fault.py")), str(tmp_path)]
        settings = EngineSettings(
            model=str(TARGET),
            device="cpu",
            drafter="none",
            policy="off",
            kv_memory_mb=64,
            parent=os.getpid(),
        )
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None and process.stderr is not None
        try:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            while not isinstance(event := decode_event(events.recv()), Ready):
                pass
            commands.send(
                encode(
                    Submit(
                        [
                            GenerateRequest(
                                id="a", token_ids=FAULTY, seed=1, sampling=Sampling(max_tokens=4)
                            )
                        ]
                    )
                )
            )
            while not isinstance(event := decode_event(events.recv()), Failed):
                pass
            assert event == Failed(
                "engine_failed", f"the GPU reported '{REPORTED}'; the engine restarts"
            )
            assert process.wait(60) == 1, "nothing of it was freed, which would have taken an hour"
            said = process.stderr.read().decode()
            assert "freed" not in said and "AcceleratorError" in said
        finally:
            process.kill()
            process.wait()


def test_the_engine_ends_after_its_server_is_killed() -> None:
    with ServerProcess(*FAST_START) as server:
        pid = engine(server.process.pid)
        server.process.kill()
        server.process.wait()
        until(
            lambda: (
                not Path(f"/proc/{pid}").exists()
                or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
            )
        )
