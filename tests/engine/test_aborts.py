"""An abort ends the wait for a trainer that falls silent: the push is answered and the next one
taken within a moment.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, cpu_settings, perturbed, why
from tests.engine.tiny import SMALLEST, write_target
from tlt_client.channels import broadcast
from tlt_client.channels.groups import Membership, WeightGroup, host_store
from tlt_client.channels.ipc import OFFER
from tlt_client.channels.line import Line, address, entered
from tlt_client.channels.memory import share
from tlt_client.channels.tensors import entry
from tlt_server.weights.staging import Staging

TIMEOUT_S = 90.0  # each wait for a trainer
MOMENT_S = 20.0  # far less than that, on a machine that does other things, too
Trainer = Callable[[Pushable, dict[str, torch.Tensor]], Iterator[dict[str, Any]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("aborts")
    write_target(root / "base", shape=SMALLEST)
    perturbed(root / "base", root / "new", 1)
    return root


@pytest.fixture(scope="module")
def engine(root: Path) -> Pushable:
    return Pushable(
        cpu_settings(
            root / "base",
            kv_memory_mb=4,
            weight_root=str(root),
            threads=1,
            weight_channels="disk,broadcast,ipc",
            weight_timeout_s=TIMEOUT_S,
        )
    )


def entries(tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [entry(name, tensor, checksum=False) for name, tensor in tensors.items()]


def never_comes(engine: Pushable, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    yield {"channel": "ipc", "path": "none"}


def stops_in_the_middle(
    engine: Pushable, tensors: dict[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """Stop by ipc after the first bucket."""
    yield {"channel": "ipc", "path": "half", "bucket_bytes": 1}
    directory = entered(Path(engine.engine.pushes.state().sockets))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    size = next(iter(tensors.values())).nbytes
    connection.connect(address(directory, "half"))
    with (
        closing(Line(connection, TIMEOUT_S)) as line,
        closing(share(2 * size, torch.device("cpu"))) as memory,
    ):
        line.send(memory.grant.packed(), memory.descriptors)
        line.send(OFFER.pack(0, 0, size))
        line.receive(8)
        yield {}


def joined(engine: Pushable) -> WeightGroup:
    """Rank 0 of a group with the engine."""
    store, made = host_store("127.0.0.1", 0, 2, TIMEOUT_S), list[WeightGroup]()
    ends = [
        Membership("g", "gloo", "127.0.0.1", store.port, rank, 2, timeout_s=TIMEOUT_S)
        for rank in (0, 1)
    ]
    trainer = threading.Thread(target=lambda: made.append(WeightGroup(ends[0], store)))
    trainer.start()
    engine.engine.pushes.transaction.options.intake.groups.join(ends[1])
    trainer.join()
    return made[0]


def broadcasts_nothing(
    engine: Pushable, tensors: dict[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    group = joined(engine)
    yield {"channel": "broadcast", "group": "g"}
    yield {}
    group.close()


def reads(engine: Pushable) -> bool:
    """Return True if the staging thread waits for tensors."""
    push = engine.engine.pushes.transaction.push
    return push is not None and isinstance(push.state, Staging) and push.state.phase == "read"


@pytest.mark.parametrize("trainer", [never_comes, stops_in_the_middle, broadcasts_nothing])
def test_abort_ends_the_wait_for_a_silent_trainer(
    trainer: Trainer, engine: Pushable, root: Path
) -> None:
    tensors, sums = load_file(root / "new" / "model.safetensors"), engine.checksums()
    doing = trainer(engine, tensors)
    pushed = engine.send_push(
        **{"path": "", "version": "silent", "tensors": entries(tensors), **next(doing)}
    )
    engine.until(lambda: engine.engine.pushes.transaction.push is not None, "push")
    push = engine.engine.pushes.transaction.push
    assert push is not None
    engine.until(lambda: reads(engine), "waiting for the trainer")
    next(doing, None)
    engine.step(3)
    assert pushed not in engine.reports
    started = time.monotonic()
    assert engine.abort("silent").result == "aborted"
    assert time.monotonic() - started < MOMENT_S, "the loop does not wait for the trainer"
    report = engine.report(pushed)
    assert (report.result, report.state.open) == ("conflict", {}) and "aborted" in why(report)
    assert time.monotonic() - started < MOMENT_S < TIMEOUT_S / 2
    assert engine.checksums() == sums
    assert engine.push(root / "new", "after").result == "committed"
    assert engine.roll_back().result == "rolled_back"
    next(doing, None)


def test_late_tensors_of_an_aborted_push_leave_the_group_usable(
    engine: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "STOP_S", 60.0)  # it comes, however busy the machine is
    tensors = load_file(root / "new" / "model.safetensors")
    group = joined(engine)
    fields = {"channel": "broadcast", "group": "g", "packed": False, "tensors": entries(tensors)}

    def send() -> None:
        for tensor in tensors.values():
            group.end(group.begin(tensor.contiguous()))

    pushed = engine.send_push("", "ended", **fields)
    engine.until(lambda: reads(engine), "waiting for the trainer")
    assert engine.abort("ended").result == "aborted"
    for version in ("", "taken"):
        sender = threading.Thread(target=send)
        if version:
            pushed = engine.send_push("", version, **fields)
        sender.start()
        assert engine.report(pushed).result == ("committed" if version else "conflict")
        sender.join()
    engine.roll_back()
    group.close()
