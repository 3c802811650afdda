"""Faults in the handling of one command, one sequence or one figure: they end what they concern,
and all others get the tokens of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.gpu_engine import checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import (
    Abort,
    ClearCache,
    LookAtWeights,
    Pause,
    Recompute,
    Resume,
    SetPolicy,
    Sleep,
    Submit,
)
from tlt_server.wire.records import GenerateRequest, encode

pytestmark = pytest.mark.contains_faults
SECRET = "what a request says"
ASKED = [request(i, 5 + i, max_tokens=8) for i in range(3)]


def broken(*args: Any, **options: Any) -> Any:
    raise KeyError(SECRET)


def lost(*args: Any) -> Any:
    raise EngineFailed("rank 1 has ended")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    made = checkpoints(tmp_path_factory.mktemp("smallest"))
    return drafting(on_cpu(made), "eagle", 2, 2, 4)


@pytest.fixture(scope="module")
def shared(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


@pytest.fixture(scope="module")
def plain(shared: Pushable) -> dict[str, Any]:
    return shared.run(*ASKED)


@pytest.fixture
def engine(shared: Pushable, plain: dict[str, Any]) -> Iterator[Pushable]:
    """Return an engine with three sequences under way; nothing leaks from it."""
    shared.said.clear()
    shared.submit(*ASKED)
    shared.step(2)
    before = shared.engine.faults.count
    yield shared
    shared.finish()
    assert shared.engine.faults.count > before, "nothing was contained"
    assert shared.engine.gauges()["contained_faults"] == shared.engine.faults.count
    assert shared.engine.gauges()["pages_free"] == shared.info.pages
    for id in shared.said:
        assert sum(output.finish_reason is not None for output in shared.said[id]) == 1, id


def ends(engine: Pushable) -> dict[str, str]:
    engine.finish()
    return {id: said[-1].finish_reason or "" for id, said in engine.said.items()}


def same(engine: Pushable, plain: dict[str, Any], *ids: str) -> bool:
    return all((engine.tokens(id), engine.logprobs(id)) == plain[id] for id in ids)


@pytest.mark.parametrize("place", ["append", "page_keys", "leave"])
def test_fault_in_one_sequence_ends_only_that_sequence(
    place: str,
    engine: Pushable,
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (sequence,) = [each for each in engine.engine.scheduler.running if each.id == "r1"]
    if place == "leave":  # the end is half done when it fails
        left = sequence.leave
        monkeypatch.setattr(sequence, "leave", lambda: (left(), broken()))
    elif place == "append":
        monkeypatch.setattr(sequence, "append", broken)
    else:
        monkeypatch.setattr(sequence, "page_keys", broken)
        sequence.published = -1
    assert ends(engine) == {"r0": "length", "r1": "error", "r2": "length"}
    assert same(engine, plain, "r0", "r2")
    error = engine.said["r1"][-1].error
    assert error is not None and error[0] == "engine_failed" and "KeyError" in error[1]
    logged = capsys.readouterr().err
    assert "contained_fault in sequence r1" in logged and "in broken" in logged
    assert SECRET not in logged + error[1], "messages may quote a request"


def test_batch_that_cannot_be_built_ends_alone(
    engine: Pushable, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine.engine._commands._make_sequence

    def some(one: GenerateRequest) -> Any:
        return broken() if one.id == "bad" else made(one)

    monkeypatch.setattr(engine.engine._commands, "_make_sequence", some)
    engine.submit(
        msgspec.structs.replace(ASKED[0], id="good"), msgspec.structs.replace(ASKED[0], id="bad")
    )
    found = ends(engine)
    assert (found["good"], found["bad"]) == ("error", "error") and same(engine, plain, "r0", "r1")


def test_partly_queued_batch_is_withdrawn(
    engine: Pushable, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines, seen = engine.engine.scheduler._open.deadlines, list[str]()
    monkeypatch.setattr(deadlines, "add", lambda one: broken() if seen else seen.append(one.id))
    engine.submit(*(msgspec.structs.replace(ASKED[0], id=id) for id in ("x", "y")))
    found = ends(engine)
    assert (found["x"], found["y"]) == ("error", "error") and same(engine, plain, "r0", "r1", "r2")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("choice.policy", "choose"),
        ("choice.policy", "observe"),
        ("choice.guard", "observe"),
        ("choice.knowledge", "observe"),
        ("choice.switches", "chose"),
        ("scheduler", "observe"),
        ("scheduler", "gauges"),
    ],
)
def test_failing_metric_ends_no_sequence(
    owner: str, name: str, engine: Pushable, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attrgetter(owner)(engine.engine), name, broken)
    engine.step()
    engine.engine.gauges()
    engine.finish()
    assert same(engine, plain, "r0", "r1", "r2")
    monkeypatch.undo()


def test_failing_commands_are_refused(
    engine: Pushable, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = engine.engine
    monkeypatch.setattr(inner.pushes, "_apply", broken)
    monkeypatch.setattr(inner.halt, "_do", broken)
    monkeypatch.setattr(inner.choice.changes, "_prepare", broken)
    for command in (
        SetPolicy("off", id="o"),
        ClearCache("c"),
        Pause("p"),
        Resume("r"),
        Abort(["unknown"]),
    ):
        inner.send(command)
    inner.send(LookAtWeights("w"))
    engine.step()
    assert engine.reports["w"].result == "engine_failed"
    reports = inner.control_reports()
    assert [report.id for report in reports] == ["c", "p", "r", "o"]
    assert {report.error[0] for report in reports if report.error} == {"engine_failed"}
    engine.finish()
    assert same(engine, plain, "r0", "r1", "r2")


def test_invalid_commands_end_their_named_requests(engine: Pushable, plain: dict[str, Any]) -> None:
    inner = engine.engine
    impossible = msgspec.structs.replace(ASKED[0], id="bad", seed=-1)
    unread: list[Any] = [
        Submit([msgspec.structs.replace(ASKED[0], id="good"), impossible]),
        Pause("p", "sometimes"),  # type: ignore[arg-type]
        SetPolicy(7, id="o"),  # type: ignore[arg-type]
        LookAtWeights("w", "yes"),  # type: ignore[arg-type]
        Recompute([b""]),
    ]
    for command in unread:
        inner.receive(encode(command))
    engine.step()
    assert [report.id for report in inner.control_reports()] == ["p", "o"]
    assert engine.reports["w"].result == "engine_failed"
    found = ends(engine)
    assert (found["good"], found["bad"]) == ("error", "error") and same(engine, plain, "r0", "r1")
    with pytest.raises(msgspec.DecodeError):
        inner.receive(encode(command)[:-1])


def test_engine_wide_faults_end_the_engine(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's error, a lost rank or step, memory in doubt, and a structure wrong after a fault."""
    inner = engine.engine
    for error in (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        EngineFailed("rank 1 has ended"),
    ):
        with pytest.raises(type(error)):
            inner.faults.contain(error, "a test")
    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(inner.halt, "_do", broken)
        inner.send(Sleep("s", ["weights"]))
        inner.step()
    with monkeypatch.context() as patched, pytest.raises(EngineFailed, match="rank 1"):
        patched.setattr(inner.pushes, "_apply", lost)
        inner.send(LookAtWeights("w"))
        inner.step()
    with monkeypatch.context() as patched, pytest.raises(EngineFailed, match="in flight was lost"):
        patched.setattr(inner.runner, "collect", broken)
        inner.send(Pause("p", "recompute"))
        inner.step()
    (sequence,) = [each for each in inner.scheduler.running if each.id == "r1"]
    page = sequence.pages.pop()
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(inner.pushes, "_apply", broken)
        inner.send(LookAtWeights("w"))
        inner.step()
    sequence.pages.append(page)
