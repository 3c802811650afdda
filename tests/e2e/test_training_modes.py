"""A drafter that is trained while requests run, or between them, by a process of its own on a CPU:
tokens are those of a server without it, through adoptions and the death of the trainer.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.test_drafter_training import figures
from tests.e2e.test_spot_training import TRAINED, items, status, weakened
from tests.processes import trainer
from tests.waiting import until
from tlt_client import Client
from tlt_client.errors import Conflict
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.trainer.process.states import LEAST_QUIET_S

TRAINED_ON, HELD_OUT = 8, 6  # prompts
ALL = TRAINED_ON + HELD_OUT
FLAGS = ("--drafter-feature-mb", "64", "--kv-memory-mb", "64", "--policy", "fixed")
FLAGS += ("--sd-strategy", "eagle:4x1x5", "--threads", "1")
FEW = 3
Said = list[tuple[list[int], list[float]]]


def said(client: Client, count: int = ALL) -> Said:
    asked = [
        {**item, "sampling": {"max_tokens": 32}}
        for item in items()[TRAINED - TRAINED_ON : TRAINED + HELD_OUT]
    ]
    choices = [result.choices[0] for result in client.generate(asked[:count]).results]
    return [(choice.token_ids, choice.logprobs) for choice in choices]


@contextmanager
def asking(url: str, pause_s: float = LEAST_QUIET_S / 4) -> Iterator[list[Said]]:
    """Keep a few requests open; the answers come into the list. The default pauses are too short
    for a trainer that waits for an idle engine.
    """
    came: list[Said] = []
    over = threading.Event()

    def ask() -> None:
        with Client(url, timeout_s=120) as client:
            while not over.wait(pause_s):
                came.append(said(client, FEW))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield came
    finally:
        over.set()
        thread.join()


@contextmanager
def serving(mode: str, directory: Path) -> Iterator[ServerProcess]:
    flags = ("--model", str(TARGET), "--drafter", str(weakened(directory / "drafter")), *FLAGS)
    flags += ("--drafter-training", mode, "--state-dir", str(directory / "state"))
    (directory / "weights").mkdir()
    with ServerProcess(*flags, "--weight-root", str(directory / "weights")) as server:
        yield server


FORCED = (sys.executable, str(Path(__file__).with_name("forced_adoptions.py")))


@pytest.mark.soak
def test_ten_adoptions_and_a_trainer_death_change_no_token(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts run while the trainer starts, parks, adopts, is killed, comes back and goes on."""
    expected = said(client)
    monkeypatch.setattr("tlt_server.demo.server.COMMAND", FORCED)
    with serving("idle", tmp_path) as server, Client(server.url, timeout_s=120) as own:
        assert said(own) == expected
        versions = {own.weights()["drafter"]}

        def adopted(count: int) -> bool:
            versions.add(own.weights()["drafter"])
            return figures(own)["tlt_drafter_adoptions_total"] >= count

        with asking(server.url, pause_s=6 * LEAST_QUIET_S) as came:
            begin(own)
            until(lambda: adopted(4), within_s=600)
            assert status(own)["parkings"] > 0
            os.kill(trainer(server.process.pid), signal.SIGKILL)
            until(lambda: status(own)["restarts"] == 1)
            begin(own)
            until(lambda: adopted(10), within_s=600)
        found, seen = status(own), figures(own)
        assert said(own) == expected
    assert len(came) > 10 and all(each == expected[:FEW] for each in came)
    assert found["parkings"] > 0 and seen["tlt_drafter_self_check_differences_total"] == 0
    numbers = sorted(int(re.match(r"drafter-initial-(\d+)-", v)[1]) for v in versions - {"initial"})
    assert len(numbers) >= 8 and numbers[-1] >= 10  # a version may be missed between two looks


def begin(client: Client) -> None:
    """Have a round begin, unless one has."""
    until(lambda: status(client)["process"] == "running")
    with suppress(Conflict):
        client.train_drafter()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["device", "share"])
def test_training_changes_no_token_of_running_requests(
    mode: str, client: Client, tmp_path: Path
) -> None:
    expected = said(client)
    with serving(mode, tmp_path) as server, Client(server.url, timeout_s=120) as own:
        assert said(own) == expected
        until(lambda: own.drafter()["buffer"]["sequences"] >= ALL)
        with asking(server.url) as came:
            begin(own)
            until(lambda: status(own)["steps"] >= 2 and status(own)["slowdown"])
        found, seen = status(own), figures(own)["tlt_trainer_slowdown"]
    assert came and all(each == expected[:FEW] for each in came)
    assert found["parkings"] == 0 and found["device"] == "cpu" and seen > 0
