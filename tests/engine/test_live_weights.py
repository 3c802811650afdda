"""Live weights: named, and read while the loop steps on; their checksums are of one version."""

from __future__ import annotations

import itertools
import shutil
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, on_cpu
from tests.engine.halting import bits, done, engine, expected, send, started
from tests.engine.pushing import Pushable, why
from tests.engine.weight_cases import root, settings
from tlt_server.engine.pushes import reads as weight_reads
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.cost import CostModel, Measured, StepLoad
from tlt_server.trainer.replaying.handed import read_handed
from tlt_server.weights import arriving, checksums, handover
from tlt_server.wire.commands import (
    CommitWeights,
    HandOver,
    LookAtWeights,
    NameWeights,
    ReadWeights,
    Sleep,
)
from tlt_server.wire.events import WeightReport

__all__ = ["engine", "expected", "root", "settings"]  # fixtures


def test_active_version_can_be_renamed(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path))
    engine = Pushable(kept)
    started(engine)

    ids = (f"n{i}" for i in itertools.count())

    def name(version: str) -> WeightReport:
        id = next(ids)
        engine.engine.send(NameWeights(id, version))
        return engine.report(id)

    assert name("first").result == "named" and name("first").result == "unchanged"
    engine.finish()
    assert [version for version, _, _ in engine.spans("r0")] == ["initial", "first"]
    assert engine.push(root / "new", "v1").result == "committed"
    label = name("first")
    assert label.result == "named"
    assert label.state.target.startswith("first~"), "the name belongs to other content"
    assert engine.push(root / "base", "first").result == "committed", (
        "the same content under its name"
    )
    assert name("second").state.target == "second"
    assert Pushable(kept).info.weight_version == "second", "a restart knows the name"


def test_staged_push_is_committed_under_the_latest_given_name(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path))
    engine = Pushable(kept)
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    engine.engine.send(CommitWeights("c", "v1", "one"))
    report = engine.report("c")
    assert (report.result, report.version, report.state.target) == ("committed", "one", "one")
    assert engine.push(root / "base", "one").result == "conflict"
    assert Pushable(kept).info.weight_version == "one"


def test_weights_stay_while_a_push_is_staged_in_a_thread(engine: Pushable, root: Path) -> None:
    id = engine.send_push(root / "new", "v1")
    engine.engine.send(Sleep("s", ["weights"]))
    engine.step()
    [report] = engine.engine.control_reports()
    assert why(report).startswith("conflict")
    assert engine.report(id).result == "committed"


def test_rows_of_a_live_tensor_can_be_read(engine: Pushable) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    engine.engine.send(ReadWeights("a", name, 2))
    engine.engine.send(ReadWeights("b", "draft.norm.weight", 3))
    engine.engine.send(ReadWeights("c", "no.such", 2))
    rows, vector, missing = (engine.report(id) for id in "abc")
    live = engine.engine.pushes.transaction.versions.live.target.network.parameters()[name]
    assert array("f", rows.values).tolist() == live[:2].flatten().tolist()
    assert rows.shape == [2, *live.shape[1:]]
    assert len(array("f", vector.values)) == 3 and vector.shape == [3]
    assert why(missing).startswith("not_found")


def read(engine: Pushable, name: str, rows: int) -> WeightReport:
    engine.engine.send(ReadWeights("read", name, rows))
    engine.reports.pop("read", None)
    return engine.report("read")


def test_weight_read_beyond_the_limit_is_refused(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = engine.engine.pushes.transaction.versions.live.target.network.parameters()[
        "model.embed_tokens.weight"
    ]
    monkeypatch.setattr(weight_reads, "MAX_NUMBERS", 4 * live.shape[1])
    assert read(engine, "model.embed_tokens.weight", 4).result == "looked"
    refused = read(engine, "model.embed_tokens.weight", 5)
    assert refused.result == "invalid_request"
    assert f"limit is {4 * live.shape[1]}: ask for at most 4 (truncate_size)" in why(refused)


def test_a_tensor_is_read_while_the_loop_runs(
    engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop keeps stepping while a reader is slow, and changes of weights wait for it."""
    go_on = threading.Event()
    tensor = engine.engine.pushes.transaction.versions.live.target.network.parameters()[
        "model.norm.weight"
    ]
    monkeypatch.setattr(
        weight_reads.WeightReads, "_readable", lambda *_, changing: Slow(go_on, tensor)
    )
    engine.engine.send(ReadWeights("slow", "model.norm.weight", 4))
    started(engine)
    refused = send(engine, Sleep("s", ["weights"]))
    assert why(refused).startswith("conflict")
    engine.finish()
    assert bits(engine) == expected and "slow" not in engine.reports
    go_on.set()
    assert engine.report("slow").values == tensor.numpy().tobytes()


class Slow:
    """A tensor whose device is busy until released."""

    def __init__(self, go_on: threading.Event, tensor: torch.Tensor) -> None:
        self._go_on, self._tensor, self.shape = go_on, tensor, tensor.shape

    def float(self) -> torch.Tensor:
        assert self._go_on.wait(60)
        return self._tensor.float()


def test_push_proceeds_while_old_weights_go_to_the_trainer(
    engine: Pushable, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, writing = threading.Event(), threading.Event()

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        writing.set()
        assert go_on.wait(60)
        save_file(tensors, path)

    monkeypatch.setattr(handover, "save_file", slow)
    live = engine.engine.pushes.transaction.versions.live
    embedding = live.target.network.parameters()["model.embed_tokens.weight"].clone()
    engine.engine.send(HandOver("out", str(tmp_path / "out"), str(root / "drafter")))
    engine.step()
    assert writing.wait(60)
    assert engine.push(root / "new", "v1").result == "committed"
    go_on.set()
    report = engine.report("out")
    assert (report.result, report.state.target) == ("looked", "initial"), report
    written = load_file(tmp_path / "out" / handover.TARGET)[handover.EMBEDDING]
    assert torch.equal(written, embedding)


def test_step_times_are_handed_over_after_measurement(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine, cost = Pushable(settings), CostModel()

    def handed(name: str) -> CostModel | None:
        engine.engine.send(HandOver(name, str(tmp_path / name), str(root / "drafter")))
        assert engine.report(name).result == "looked"
        return read_handed(
            tmp_path / name, root / "base", "initial", "initial", "cpu", leaves=1
        ).cost

    assert handed("before") is None
    with_drafts = Measured(StepLoad("eagle", 3, 2, 1, 7, 0, 10.0), 0.01)
    plain = Measured(StepLoad("", 0, 0, 1, 1, 0, 10.0), 0.004)
    engine.engine.choice.knowledge.cost = cost
    cost.profile([plain])
    assert handed("plain") is None, "nothing is known of drafts"
    cost.profile([plain, with_drafts])
    found = handed("after")
    assert found is not None and found.predict(plain.load) == pytest.approx(0.004, rel=0.1)
    assert found.predict(with_drafts.load) == pytest.approx(cost.predict(with_drafts.load))


def test_weights_are_not_read_while_changing_or_asleep(
    settings: EngineSettings, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "TOGETHER", 1)  # each tensor is written before the next is seen
    engine = Pushable(replace(settings, weight_staging="none", weight_root="/"))
    name = "model.norm.weight"

    def refused(words: str) -> None:
        report = read(engine, name, 4)
        assert why(report).startswith("conflict") and words in why(report)
        assert not report.values

    with pytest.MonkeyPatch.context() as patched:
        # It is about to write.
        patched.setattr(engine.engine.pushes.transaction, "start", lambda: None)
        id = engine.send_push(root / "new", "v1")
        refused("are changing")
    assert engine.report(id).result == "committed" and read(engine, name, 4).result == "looked"
    torn = load_file(shutil.copytree(root / "base", tmp_path / "torn") / "model.safetensors")
    torn["model.norm.weight"][3] = float("nan")
    save_file(torn, tmp_path / "torn" / "model.safetensors")
    assert engine.push(tmp_path / "torn", "v2").state.quarantined
    refused("push that version, or another")
    assert engine.push(root / "base", "v3").result == "committed"
    assert read(engine, name, 4).result == "looked"
    done(engine, Sleep("s", ["weights"]))
    refused("the weights sleep")


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


@pytest.fixture(params=["interpreter", "cpu"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pushable]:
    """An engine on the CPU, or on the interpreter."""
    settings = checkpoints(tmp_path)
    with patched_once():
        yield Pushable(settings if request.param == "interpreter" else on_cpu(settings))


def look_halfway(either: Pushable, monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader(monkeypatch)
    either.engine.send(LookAtWeights("look", checksums=True))
    either.step()
    assert reader.halfway.wait(60)
    return reader


def test_commit_waits_for_readers(
    either: Pushable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = either.checksums()
    assert either.push(tmp_path / "new", "v1", commit=False).result == "staged"
    reader = look_halfway(either, monkeypatch)
    either.engine.send(CommitWeights("commit", "v1"))
    either.engine.send(LookAtWeights("later", checksums=True))
    either.step(20)
    assert "commit" not in either.reports and either.engine.pushes.busy
    reader.go_on.set()
    assert either.report("look").checksums == old and either.report("commit").result == "committed"
    new = either.report("later").checksums
    assert new != old
    assert either.checksums() == new, "who came while the commit waited sees what it committed"


def test_rollback_waits_for_readers(
    either: Pushable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = either.checksums()
    assert either.push(tmp_path / "new", "v1").result == "committed"
    new = either.checksums()
    reader = look_halfway(either, monkeypatch)
    back = either.send_roll_back()
    either.step(20)
    assert back not in either.reports
    reader.go_on.set()
    assert either.report("look").checksums == new and either.report(back).result == "rolled_back"
    assert either.checksums() == old
