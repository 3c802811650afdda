"""An engine's process reports on itself between its steps, over its real sockets; killed, it leaves
nothing that its parent does not remove.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.engine.child import EngineChild
from tests.engine.pushing import cpu_settings
from tests.engine.tiny import SMALLEST, Shape, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import ClearCache, Command, LookAtWeights, Pause, Submit
from tlt_server.wire.events import ControlReport, Heartbeat, Outputs, WeightReport
from tlt_server.wire.kept import read_started
from tlt_server.wire.records import GenerateRequest, Sampling


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    # A request of many tokens runs for seconds: it is still there when it is paused.
    slow = Shape(layers=24)
    target = write_target(tmp_path_factory.mktemp("process") / "target", shape=slow)
    with EngineChild(
        EngineSettings(model=str(target), device="cpu", policy="off", kv_memory_mb=16)
    ) as child:
        yield child


def gauges_at_answer(child: EngineChild, command: Command) -> dict[str, float]:
    """Return the last event before the command was answered."""
    child.send(command)
    gauges: dict[str, float] = {}
    for event in child.events():
        if isinstance(event, Outputs):
            gauges = event.gauges
        if isinstance(event, ControlReport):
            assert event.error is None
            return gauges
    raise AssertionError("events end with an error")


def test_gauges_are_sent_once_before_a_commands_answer(child: EngineChild) -> None:
    first = next(event for event in islice(child.events(), 60) if isinstance(event, Outputs))
    assert first.gauges["running"] == 0
    assert first.gauges["pages_free"] == child.info.pages, "told without a step, too"
    prompt, sampling = list(range(40)), Sampling(max_tokens=900, ignore_eos=True)
    child.send(Submit([GenerateRequest(id="r", token_ids=prompt, sampling=sampling, seed=1)]))
    begun = next(event for event in child.events() if isinstance(event, Outputs) and event.outputs)
    assert read_started(child.directory) == {"r"}
    assert begun.gauges["running"] == 1 and begun.gauges["pages_free"] < child.info.pages
    retracted = gauges_at_answer(child, Pause("retract", "recompute"))
    assert (retracted["running"], retracted["waiting"], retracted["pages_free"]) == (
        0,
        1,
        child.info.pages,
    )
    assert gauges_at_answer(child, ClearCache("flush", unless_held=True)) == {}, (
        "it has changed nothing"
    )
    assert [type(event) for event in islice(child.events(), 2)] == [Heartbeat, Heartbeat]


@pytest.mark.parametrize("ending", ["killed", "told"])
def test_ended_engine_leaves_no_socket_directory(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "tmp"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))  # the engine's
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    write_target(tmp_path / "base", shape=SMALLEST)
    settings = cpu_settings(tmp_path / "base", kv_memory_mb=4, threads=1, weight_channels="ipc")
    with EngineChild(settings) as child:
        child.send(LookAtWeights("look"))
        sockets = Path(
            next(event for event in child.events() if isinstance(event, WeightReport)).state.sockets
        )
        assert places in sockets.parents and sockets.stat().st_mode & 0o777 == 0o700
        if ending == "killed":
            os.kill(child.info.pid, signal.SIGKILL)
            child._process.wait()
            assert sockets.is_dir()
    assert not [place for place in places.iterdir() if place.name.startswith("tlt-")]
