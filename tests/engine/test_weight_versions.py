"""Versions and their names: rollback, repeated pushes and commits, checksums, freed memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, push_until_first_weights_end, why
from tests.engine.weight_cases import engine, request, root, settings
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.decoder import Decoder
from tlt_server.process.threads import Errands
from tlt_server.weights.checksums import checksum
from tlt_server.wire.commands import LookAtWeights, NameWeights, Pause, Sleep

__all__ = ["engine", "root", "settings"]  # fixtures


def test_rollback_restores_every_bit(engine: Pushable, root: Path) -> None:
    asked = request()
    sums, said = engine.checksums(), engine.run(asked)
    assert engine.roll_back().result == "conflict"
    engine.push(root / "new", "v1")
    assert engine.checksums() != sums and engine.run(asked) != said
    report = engine.roll_back("initial")
    assert (report.result, report.version, report.state.target) == (
        "rolled_back",
        "initial",
        "initial",
    )
    assert engine.checksums() == sums and engine.run(asked) == said
    assert engine.roll_back("initial").result == "unchanged", (
        "a repeated rollback is the same success"
    )
    assert engine.roll_back("v7").result == "conflict"


def test_unnamed_rollback_undoes_only_the_last_commit(settings: EngineSettings, root: Path) -> None:
    engine = Pushable(settings)
    engine.push(root / "new", "v1")
    engine.push(root / "new-drafter", "d1", role="drafter")
    assert engine.roll_back().role == "drafter"
    engine.push(root / "new-drafter", "d1", role="drafter")
    report = engine.roll_back("initial")
    assert (report.role, report.state.target, report.state.drafter) == (
        "all",
        "initial",
        "initial",
    ), "all that was called so"


def test_repeated_push_succeeds_and_other_content_conflicts(engine: Pushable, root: Path) -> None:
    first = engine.push(root / "new", "v1")
    again = engine.push(root / "new", "v1")
    assert (first.result, again.result) == ("committed", "unchanged")
    assert again.checksums == first.checksums
    other = engine.push(root / "newer", "v1")
    assert other.result == "conflict" and "'v1'" in why(other) and "new version" in why(other)
    assert engine.push(root / "newer", "initial").result == "conflict", (
        "what the server was started with has a content, too"
    )
    assert engine.push(root / "newer", "v2").result == "committed"
    assert engine.push(root / "new", "v1").result == "committed", (
        "a version may come back, with the same bits"
    )
    unnamed = engine.push(root / "newer")
    assert unnamed.version.startswith("newer@")
    assert engine.push(root / "newer").version == unnamed.version


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_unused_versions_are_freed_at_once_in_a_thread(
    settings: EngineSettings, root: Path, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a push ends, no reference cycle keeps its network; a thread frees the versions
    replaced by a commit or a rollback.
    """
    made: list[weakref.ref[Decoder]] = []
    blank, by = Decoder.blank, set[str]()

    def noted(model: Decoder) -> Decoder:
        network = blank(model)
        made.append(weakref.ref(network, lambda ref: by.add(threading.current_thread().name)))
        return network

    monkeypatch.setattr(Decoder, "blank", noted)
    engine = Pushable(settings)
    engine.submit(request())
    engine.step(3)
    for i in range(3):
        assert engine.push(root / "new", f"a{i}").result == "committed"
        assert engine.push(root / "newer", f"b{i}").result == "committed"
        assert engine.roll_back(f"a{i}").result == "rolled_back"
        assert engine.push(
            root / "newer",
            f"c{i}",
            tensors=[{"name": "model.norm.weight", "checksum": "mix64:" + "0" * 16}],
        ).error
        assert engine.push(root / "newer", f"d{i}", commit=False).result == "staged"
        assert engine.abort(f"d{i}").error is None
    engine.until(lambda: sum(ref() is not None for ref in made) <= 2, "end of the versions before")
    assert len(made) == 12 and by == {"free weights"}


def test_simultaneous_equal_pushes_are_one_but_others_conflict(
    engine: Pushable, root: Path
) -> None:
    ids = [engine.send_push(root / "new", "v1") for _ in range(2)]
    other = engine.send_push(root / "newer", "v2")
    assert [engine.report(id).result for id in (*ids, other)] == [
        "committed",
        "committed",
        "conflict",
    ]
    assert "'v1' is being pushed" in why(engine.report(other))
    assert (engine.report(other).role, engine.report(other).version) == ("target", "v2")


def test_staged_push_waits_for_its_commit_or_abort(engine: Pushable, root: Path) -> None:
    sums = engine.checksums()
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    assert engine.commit("v2").result == "not_found" and engine.checksums() == sums
    assert engine.abort("v1").result == "aborted" and engine.checksums() == sums
    assert engine.abort("v1").result == "not_found"
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    assert engine.push(root / "newer", "v2").result == "conflict"
    assert engine.roll_back().result == "conflict"
    assert engine.commit("v1").result == "committed" and engine.checksums() != sums


def test_repeated_commit_of_a_version_is_answered(engine: Pushable, root: Path) -> None:
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    first, again = engine.send_commit("v1"), engine.send_commit("v1")
    assert [engine.report(id).result for id in (first, again)] == ["committed", "committed"]
    late = engine.commit("v1")
    assert (late.result, late.version, late.role, late.state.target) == (
        "unchanged",
        "v1",
        "target",
        "v1",
    )
    assert late.checksums == engine.report(first).checksums
    assert engine.push(root / "newer", "v2", commit=False).result == "staged"
    assert engine.commit("v1").result == "unchanged" and engine.commit("v2").result == "committed"
    assert engine.commit("v1").result == "not_found", "it is kept for a rollback, and is not live"
    assert engine.push(root / "new-drafter", "v2", role="drafter", commit=False).result == "staged"
    both = engine.commit("v2")
    assert (both.result, both.role) == ("committed", "drafter"), (
        "a push on its way comes before what is live by its name"
    )
    assert engine.commit("v2").role == "all" and engine.roll_back().result == "rolled_back"
    assert engine.commit("v2").result == "not_found", "the drafter's is not live any more"


def test_repeated_commit_succeeds_while_its_version_is_live(engine: Pushable, root: Path) -> None:
    assert engine.commit("").result == "not_found"
    assert (
        engine.push(root / "new", "v1").result
        == engine.push(root / "new-drafter", "d1", role="drafter").result
        == "committed"
    )
    assert [engine.commit(version).result for version in ("v1", "d1")] == ["unchanged", "unchanged"]
    assert engine.push(root / "newer", "v2").result == "committed"
    assert engine.commit("v1").result == "not_found"
    assert engine.roll_back().result == "rolled_back"
    assert [engine.commit(version).result for version in ("v1", "d1", "v2")] == [
        "unchanged",
        "unchanged",
        "not_found",
    ]
    engine.engine.send(NameWeights("n", "r1", ""))
    assert engine.report("n").result == "named"
    assert [engine.commit(version).result for version in ("r1", "d1", "v1")] == [
        "unchanged",
        "unchanged",
        "not_found",
    ]


def test_push_and_sleep_wait_for_memory_being_freed(engine: Pushable, root: Path) -> None:
    """Push and sleep both wait; an abort ends the wait of a push."""
    freeing, go_on = engine.engine.pushes.transaction.cleanup._freeing, threading.Event()
    freeing.give(lambda: (go_on.wait(60), None)[1])
    id = engine.send_push(root / "new", "v1")
    engine.step(20)
    assert engine.engine.pushes.state().open["state"] == "staging" and id not in engine.reports
    assert engine.abort("v1").result == "aborted" and engine.report(id).result == "conflict"
    id = engine.send_push(root / "new", "v2")
    engine.step(20)
    assert id not in engine.reports
    go_on.set()
    assert engine.report(id).result == "committed"
    go_on.clear()
    freeing.give(lambda: (go_on.wait(60), None)[1])
    threading.Timer(0.5, go_on.set).start()
    engine.engine.send(Sleep("s", ["weights"]))
    engine.step()
    assert go_on.is_set() and engine.engine.control_reports()[0].error is None


def test_replaced_weights_are_freed_before_the_loop_idles(engine: Pushable, root: Path) -> None:
    for version in ("v1", "v2"):
        engine.push(root / "new", version)
    engine.engine.send(Pause("p"))
    engine.until(lambda: engine.engine.idle, "rest")
    assert not engine.engine.pushes.transaction.cleanup.due


def test_failed_background_task_stops_no_later_task(capsys: pytest.CaptureFixture[str]) -> None:
    errands, done = Errands("fail"), list[str]()
    for errand in (lambda: done.append("a"), lambda: 1 / 0, lambda: done.append("b")):
        errands.give(errand)  # type: ignore[arg-type]
    assert errands.mark().wait(60)
    assert done == ["a", "b"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_returned_checksums_can_be_declared_with_the_next_push(
    engine: Pushable, root: Path
) -> None:
    report = engine.push(root / "new", "v1")
    tensors = [{"name": name, "checksum": value} for name, value in report.checksums.items()]
    assert engine.push(root / "new", "v1-again", tensors=tensors).result == "committed"
    refused = engine.push(root / "newer", "v2", tensors=tensors)
    assert refused.result == "weights_refused" and "checksum" in why(refused)


@pytest.mark.parametrize("kind", ["mix64", "sha256", "xxh3", "xxh3_128"])
def test_every_kind_of_checksum_can_be_declared(kind: str, engine: Pushable, root: Path) -> None:
    tensors = [
        {
            "name": name,
            "checksum": checksum(kind, tensor),
            "dtype": "float32",
            "shape": list(tensor.shape),
        }
        for name, tensor in load_file(root / "new" / "model.safetensors").items()
    ]
    assert engine.push(root / "new", "v1", tensors=tensors).result == "committed"


def test_failing_checksum_computation_is_reported(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> str:
        raise RuntimeError("no memory")

    monkeypatch.setattr("tlt_server.weights.checksums.mix64", fails)
    engine.engine.send(LookAtWeights("look", checksums=True))
    report = engine.report("look")
    assert report.result == "push_failed" and "no memory" in why(report)


def test_initial_weights_are_freed_like_pushed_ones(engine: Pushable, root: Path) -> None:
    push_until_first_weights_end(engine, root)
