"""Every channel into one real server by the trainers' own halves: the same weights, the same sums;
a sender that dies changes nothing. The faults of pushes are in `tests/engine/test_push_faults.py`.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import DRAFTING
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_client.errors import NotFound
from tlt_server.__main__ import main
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

DIES = """
import os, sys, threading
from safetensors.torch import load_file
from tlt_client import Client
from tlt_client.channels.broadcast import BroadcastSender

class Dying(BroadcastSender):
    def _send(self, named, reply):
        super()._send(named[:3], reply)
        print("sent", flush=True)
        threading.Event().wait()

Dying(Client(sys.argv[1]), packed=False).push(load_file(sys.argv[2]).items(), "dies")
"""
DIES_BY_IPC = """
import sys, threading
from safetensors.torch import load_file
from tlt_client import Client
from tlt_client.channels.ipc import IpcSender

class Dying(IpcSender):
    def _offer(self, line, memory, sequence, start, size):
        if sequence == 3:
            print("sent", flush=True)
            threading.Event().wait()
        super()._offer(line, memory, sequence, start, size)

Dying(Client(sys.argv[1]), bucket_bytes=2**16).push(load_file(sys.argv[2]).items(), "dies")
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("channels")
    perturbed_copy(TARGET, root / "new", seed=1)
    perturbed_copy(DRAFTER, root / "new-drafter", seed=2)
    shutil.copy(DRAFTER / CALIBRATION, root / "new-drafter")
    (root / "weights").mkdir()
    return root


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *DRAFTING,
        "--weight-root",
        str(root / "weights"),
        "--state-dir",
        str(root / "state"),
        "--weight-channels",
        "disk,http,broadcast,ipc",
        "--weight-timeout-s",
        "20",
    ) as server:
        yield server


@pytest.fixture
def trainer(running: ServerProcess) -> Iterator[Client]:
    with Client(running.url, timeout_s=100) as client:
        yield client


def test_every_channel_brings_the_same_weights(trainer: Client, root: Path) -> None:
    tensors: dict[str, Any] = load_file(root / "new" / "model.safetensors")
    drafter = {
        f"draft.{name}": tensor
        for name, tensor in load_file(root / "new-drafter" / "model.safetensors").items()
    }
    before, sums = trainer.weight_checksums(), []
    senders = [
        DiskSender(trainer, root / "weights", max_file_bytes=2**20),
        HttpSender(trainer, max_file_bytes=2**20, chunk_bytes=2**18),
        BroadcastSender(trainer, bucket_bytes=2**20),
        IpcSender(trainer, bucket_bytes=2**20),
    ]
    for count, sender in enumerate(senders):
        reply = sender.push((tensors | drafter).items(), f"all-{count}", role="all")
        assert (reply["state"], reply["weight_version"]) == ("committed", f"all-{count}")
        sums.append(trainer.weight_checksums())
        trainer.roll_back_weights()
        assert trainer.weight_checksums() == before
        sender.close()
    assert sums[0] != before and all(other == sums[0] for other in sums)
    assert trainer.weights()["groups"] == []
    sockets = Path(trainer.weights()["sockets"])
    assert sockets.stat().st_mode & 0o777 == 0o700 and list(sockets.iterdir()) == []


def test_an_abort_ends_the_push_and_drops_the_upload_of_its_name(
    trainer: Client, root: Path
) -> None:
    HttpSender(trainer).push(
        load_file(root / "new" / "model.safetensors").items(), "both", commit=False
    )
    trainer.put_weights("both", "part-00001.safetensors", b"one byte and more", start=0, total=100)
    assert trainer.weights()["open"]["state"] == "staged" and [
        upload["version"] for upload in trainer.weights()["uploads"]
    ] == ["both"]
    assert trainer.abort_weights("both")["state"] == "aborted"
    assert not trainer.weights()["open"] and not trainer.weights()["uploads"]
    trainer.put_weights("both", "part-00001.safetensors", b"one byte and more", start=0, total=100)
    assert trainer.abort_weights("both")["state"] == "aborted", "an upload alone"
    with pytest.raises(NotFound):
        trainer.abort_weights("both")


@pytest.mark.parametrize(
    ("dies", "kind"),
    [
        pytest.param(DIES, BroadcastSender, id="broadcast"),
        pytest.param(DIES_BY_IPC, IpcSender, id="ipc", marks=pytest.mark.long),
    ],
)
def test_killed_sender_changes_nothing_and_the_next_is_served(
    dies: str, kind: Any, running: ServerProcess, trainer: Client, root: Path
) -> None:
    before = trainer.weight_checksums()
    file = str(root / "new" / "model.safetensors")
    with subprocess.Popen(
        [sys.executable, "-c", dies, running.url, file], stdout=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdout is not None and dying.stdout.readline() == "sent\n"
        assert trainer.weights()["open"]["state"] == "staging"
        said = (
            trainer.generate([{"prompt": "2+2=", "seed": 1}], sampling={"max_tokens": 4})
            .results[0]
            .choices[0]
        )
        dying.send_signal(signal.SIGKILL)
    until(lambda: not trainer.weights()["open"])
    assert trainer.weight_checksums() == before
    again = (
        trainer.generate([{"prompt": "2+2=", "seed": 1}], sampling={"max_tokens": 4})
        .results[0]
        .choices[0]
    )
    assert (again.token_ids, again.logprobs) == (said.token_ids, said.logprobs)
    assert (
        kind(trainer).push(load_file(file).items(), f"after-{kind.__name__}")["state"]
        == "committed"
    )
    trainer.roll_back_weights()
    with pytest.raises(ServerError, match="make the group first"):
        trainer.push_weights(
            "v",
            channel="broadcast",
            group="absent",
            tensors=[{"name": "w", "dtype": "float32", "shape": [1]}],
        )


def test_the_command_pushes_shows_and_rolls_back(
    running: ServerProcess, trainer: Client, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tlt(*words: str) -> tuple[int, str, str]:
        status = main(["weights", *words, "--url", running.url])
        said = capsys.readouterr()
        return status, " ".join(said.out.split()), said.err

    before = trainer.weight_checksums()
    pushed = (
        "push",
        str(root / "new"),
        "--version",
        "by-http",
        "--channel",
        "http",
        "--drafter",
        str(root / "new-drafter"),
    )
    status, out, err = tlt(*pushed)
    assert (status, err) == (
        0,
        "",
    ) and "committed: version 'by-http' of the target and drafter" in out
    assert "phases: " in out and "together sha256:" in out
    assert (
        "live: target 'by-http', drafter 'by-http'" in tlt("status")[1]
        and trainer.weight_checksums() != before
    )
    assert tlt(*pushed)[1].startswith("unchanged: ")
    status, out, _ = tlt("rollback")
    assert status == 0 and "rolled_back" in out and trainer.weight_checksums() == before
    status, _, err = tlt("rollback")
    assert status == 1 and "no version is kept to go back to" in err
    status, _, err = tlt("push", str(root / "new"), "--version", "v")
    assert status == 1 and "outside the weight root" in err
    status, _, err = tlt("push", str(root / "new" / "model.safetensors"), "--version", "v")
    assert status == 2 and "--channel http" in err
    status, _, err = tlt("push", str(TARGET / "config.json"), "--version", "v", "--channel", "http")
    assert status == 2 and "not a whole safetensors file" in err
    assert (
        main(["weights", "status", "--url", "http://127.0.0.1:9"]) == 1
        and "cannot be reached" in capsys.readouterr().err
    )
