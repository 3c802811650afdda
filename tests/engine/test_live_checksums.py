"""Checksums of live weights cover one version, even if another is committed during the read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints
from tests.engine.pushing import Pushable
from tlt_server.weights import checksums
from tlt_server.wire.commands import CommitWeights, LookAtWeights


class Reader:
    """Holds the thread that sums at its fourth tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.halfway, self.go_on, self._tensors = threading.Event(), threading.Event(), 0
        self._sound = checksums.mix64
        monkeypatch.setattr(checksums, "mix64", self._mix64)

    def _mix64(self, tensor: Tensor) -> str:
        if threading.current_thread().name == "read weights":
            self._tensors += 1
            if self._tensors == 4:
                self.halfway.set()
                assert self.go_on.wait(60)
        return self._sound(tensor)


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with patched_once():
        yield


@pytest.fixture(params=["interpreter", "cpu"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Pushable:
    settings = checkpoints(tmp_path)
    return Pushable(
        settings
        if request.param == "interpreter"
        else replace(settings, device="cpu", attention="cpu")
    )


def look_halfway(engine: Pushable, monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader(monkeypatch)
    engine.engine.send(LookAtWeights("look", checksums=True))
    engine.step()
    assert reader.halfway.wait(60)
    return reader


def test_a_commit_waits_for_who_reads(
    engine: Pushable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = engine.checksums()
    assert engine.push(tmp_path / "new", "v1", commit=False).result == "staged"
    reader = look_halfway(engine, monkeypatch)
    engine.engine.send(CommitWeights("commit", "v1"))
    engine.engine.send(LookAtWeights("later", checksums=True))
    engine.step(20)
    assert "commit" not in engine.reports and engine.engine.pushes.busy
    reader.go_on.set()
    assert engine.report("look").checksums == old and engine.report("commit").result == "committed"
    new = engine.report("later").checksums
    assert new != old
    assert engine.checksums() == new, "who came while the commit waited sees what it committed"


def test_a_rollback_waits_for_who_reads(
    engine: Pushable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = engine.checksums()
    assert engine.push(tmp_path / "new", "v1").result == "committed"
    new = engine.checksums()
    reader = look_halfway(engine, monkeypatch)
    back = engine.send_roll_back()
    engine.step(20)
    assert back not in engine.reports
    reader.go_on.set()
    assert engine.report("look").checksums == new and engine.report(back).result == "rolled_back"
    assert engine.checksums() == old
