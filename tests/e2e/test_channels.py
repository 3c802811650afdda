"""Every channel into one real server by the trainers' own halves: the same weights, the same sums.
The faults of pushes are in `tests/engine/test_channel_faults.py` and `test_push_faults.py` there.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, cpu_settings, why
from tlt_client import Client
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_server.__main__ import main
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("channels")
    perturbed_copy(TARGET, root / "new", seed=1)
    perturbed_copy(DRAFTER, root / "new-drafter", seed=2)
    shutil.copy(DRAFTER / CALIBRATION, root / "new-drafter")
    return root


@pytest.fixture
def trainer(pushable: ServerProcess) -> Iterator[Client]:
    with Client(pushable.url, timeout_s=100) as client:
        yield client


def test_every_channel_brings_the_same_weights(
    trainer: Client, root: Path, weight_root: Path
) -> None:
    tensors: dict[str, Any] = load_file(root / "new" / "model.safetensors")
    drafter = {
        f"draft.{name}": tensor
        for name, tensor in load_file(root / "new-drafter" / "model.safetensors").items()
    }
    before, sums = trainer.weight_checksums(), []
    senders = [
        DiskSender(trainer, weight_root, max_file_bytes=2**20),
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


def test_an_engine_takes_by_peer_what_a_server_was_pushed(
    trainer: Client, pushable: ServerProcess, root: Path, tmp_path: Path
) -> None:
    before = trainer.weight_checksums()
    sender = HttpSender(trainer, max_file_bytes=2**20)
    sender.push_directory(root / "new", "shared", drafter=root / "new-drafter", role="all")
    settings = {"state_dir": tmp_path, "weight_channels": "http", "link_port": 0, "threads": 1}
    taker = Pushable(cpu_settings(TARGET, DRAFTER, **settings))
    for role in ("target", "drafter"):
        report = taker.push(pushable.url, "shared", channel="peer", role=role)
        assert report.result == "committed", why(report)
    assert taker.checksums() == trainer.weight_checksums() != before
    trainer.roll_back_weights()
    assert trainer.weight_checksums() == before
    assert "'shared' of the target is not live" in why(
        taker.push(pushable.url, "shared", channel="peer", in_flight="abort")
    )


def test_the_command_pushes_shows_and_rolls_back(
    pushable: ServerProcess, trainer: Client, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tlt(*words: str) -> tuple[int, str, str]:
        status = main(["weights", *words, "--url", pushable.url])
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
    assert (status, err) == (0, "")
    assert "committed: version 'by-http' of the target and drafter" in out
    assert "phases: " in out and "together sha256:" in out
    assert "live: target 'by-http', drafter 'by-http'" in tlt("status")[1]
    assert trainer.weight_checksums() != before
    assert tlt(*pushed)[1].startswith("unchanged: ")
    status, out, _ = tlt("rollback")
    assert status == 0 and "rolled_back" in out and trainer.weight_checksums() == before
    status, _, err = tlt("rollback")
    assert status == 1 and "no version is kept for a rollback" in err
    status, _, err = tlt("push", str(root / "new"), "--version", "v")
    assert status == 1 and "outside the weight root" in err
    status, _, err = tlt("push", str(root / "new" / "model.safetensors"), "--version", "v")
    assert status == 2 and "--channel http" in err
    status, _, err = tlt("push", str(TARGET / "config.json"), "--version", "v", "--channel", "http")
    assert status == 2 and "not a whole safetensors file" in err
    assert main(["weights", "status", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
