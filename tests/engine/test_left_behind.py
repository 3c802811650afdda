"""An engine's process that is killed leaves nothing that its parent does not remove."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.engine.child import EngineChild
from tests.engine.tiny import SMALLEST, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import LookAtWeights
from tlt_server.wire.events import WeightReport


@pytest.mark.parametrize("ending", ["killed", "told"])
def test_no_directory_of_sockets(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "tmp"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))  # the engine's
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    write_target(tmp_path / "base", shape=SMALLEST)
    settings = EngineSettings(
        model=str(tmp_path / "base"),
        device="cpu",
        drafter="none",
        policy="off",
        kv_memory_mb=4,
        threads=1,
        weight_channels="ipc",
    )
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
