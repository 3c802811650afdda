"""The word of shared memory that tells the trainer of work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_server.errors import StartupError
from tlt_server.samples.activity import Activity, ActivityReader, make_activity
from tlt_server.trainer.process.modes import MODES


def test_the_trainer_sees_work_as_soon_as_there_is_some(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told, seen = Activity(tmp_path / "activity"), ActivityReader(tmp_path / "activity")
    assert seen.busy  # the engine is not ready
    told.set("engine", 0)
    assert not seen.busy
    with told.during("requests"):
        assert seen.busy and seen.age_ms < 1000
        told.set("sequences", 2)
    assert seen.busy
    told.set("sequences", 0)
    assert not seen.busy
    told.sleeps(True)
    told.sleeps(True)  # the same one
    assert seen.busy and seen.asleep == told.asleep == 1
    told.sleeps(False)
    assert not seen.busy and not seen.asleep
    told.sleeps(True)
    assert seen.asleep == 2


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(64))
    with pytest.raises(StartupError, match="another file"):
        ActivityReader(tmp_path / "other")


def test_only_the_reasons_of_the_mode_stop_the_trainer(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told = Activity(tmp_path / "activity", MODES["device"].parks_for)
    seen = ActivityReader(tmp_path / "activity")
    told.set("sequences", 3)
    assert seen.busy  # the engine is not ready
    told.set("engine", 0)
    assert not seen.busy
    with told.during("requests"):
        assert not seen.busy
        with told.during("weights"):
            assert seen.busy
    assert not seen.busy
    told.sleeps(True)
    assert seen.busy


def test_engine_sees_trainer_activity_until_the_trainer_ends(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told, trainer, engine = (
        Activity(tmp_path / "activity"),
        *(ActivityReader(tmp_path / "activity") for _ in range(2)),
    )
    assert not engine.runs
    trainer.runs = True
    assert engine.runs
    told.trainer_ended()
    assert not engine.runs
