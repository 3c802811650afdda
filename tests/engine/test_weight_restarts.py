"""Restarts with a state directory: committed versions are served bit for bit, or named as lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed, why
from tests.engine.weight_cases import engine, request, root, settings
from tlt_client.channels import checkpoint
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.speculation.calibration import BUCKETS, PHASES, RANKS, Calibration
from tlt_server.weights.checksums import checksum
from tlt_server.wire.commands import CommitWeights

__all__ = ["engine", "root", "settings"]  # fixtures


@pytest.fixture
def kept(settings: EngineSettings, tmp_path: Path) -> Iterator[EngineSettings]:
    yield replace(settings, state_dir=str(tmp_path / "state"))


def test_restarted_engine_serves_exactly_the_committed_versions(
    kept: EngineSettings, root: Path, tmp_path: Path
) -> None:
    work = perturbed(root / "base", root / "rewritten", 9)
    engine = Pushable(kept)
    engine.push(root / "new", "v1")
    assert (
        engine.push(work, "v2", role="all", drafter_path=str(root / "new-drafter")).result
        == "committed"
    )
    sums, generated = engine.checksums(), engine.run(request())
    save_file(
        {name: tensor * 0 for name, tensor in load_file(work / "model.safetensors").items()},
        work / "model.safetensors",
    )  # in place
    shutil.rmtree(root / "rewritten")
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.drafter_version) == ("v2", "v2")
    assert again.checksums() == sums
    assert again.run(request()) == generated
    assert again.spans("r0") == [("v2", 0, 40)]
    assert again.push(root / "newer", "v2").result == "conflict", (
        "a restart remembers what the version holds"
    )


@pytest.mark.parametrize("links", [True, False])
def test_upload_serving_one_role_is_kept_by_a_second_link(
    kept: EngineSettings, root: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(checkpoint, "BUCKET_BYTES", 4096)  # so that a file comes in several batches
    if not links:
        monkeypatch.setattr(os, "link", refused)
    uploads = Path(kept.state_dir) / "uploads" / "v1"
    uploads.mkdir(parents=True)
    target = load_file(root / "new" / "model.safetensors")
    drafter = load_file(root / "new-drafter" / "model.safetensors")
    (last, tensor), *others = sorted(target.items())
    middle = len(others) // 2
    prefixed = {f"draft.{name}": tensor for name, tensor in drafter.items()}
    parts = {
        "a": dict(others[:middle]),
        "b": dict(others[middle:]),
        "mixed": {last: tensor, **prefixed},
    }
    for name, tensors in parts.items():
        save_file(tensors, uploads / f"{name}.safetensors")
    engine = Pushable(replace(kept, weight_channels="disk,http"))
    named = [
        {"name": name, "checksum": checksum("xxh3_128", tensor)}
        for part in parts.values()
        for name, tensor in part.items()
    ]
    assert engine.push("v1", "v1", channel="http", role="all", tensors=named).result == "committed"
    (folder,) = (Path(kept.state_dir) / "weights").glob("push-*")
    same = {
        path.stem
        for path in uploads.iterdir()
        for other in folder.rglob("*.safetensors")
        if path.samefile(other)
    }
    assert same == ({"a", "b"} if links else set())
    sums, generated = engine.checksums(), engine.run(request())
    shutil.rmtree(uploads)
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.drafter_version) == ("v1", "v1")
    assert again.checksums() == sums and again.run(request()) == generated


@pytest.mark.parametrize("channel", ["disk", "http"])
def test_pushed_calibration_is_active_and_survives_a_restart(
    kept: EngineSettings, root: Path, channel: str
) -> None:
    weights = Path(kept.weight_root or "") / "calibrated"
    uploads = Path(kept.state_dir) / "uploads" / "calibrated"
    folder = {"disk": weights, "http": uploads}[channel]
    shutil.copytree(root / "new-drafter", folder)
    table = np.random.default_rng(1).random((PHASES, RANKS, BUCKETS)).astype(np.float32)
    Calibration(table).save(folder)
    named = [
        {"name": name, "checksum": checksum("xxh3_128", tensor)}
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]
    (folder / "config.json").unlink()
    settings = replace(kept, weight_channels="disk,http")
    path = "calibrated" if channel == "http" else folder
    engine = Pushable(settings)
    report = engine.push(path, "v1", role="drafter", channel=channel, tensors=named)
    assert report.result == "committed", report.error
    shutil.rmtree(folder)
    for holder in (engine, Pushable(settings)):
        live = holder.engine.pushes.transaction.versions.live.drafter
        assert np.array_equal(live.calibration.prior_K.reshape(table.shape), table)


def test_restart_after_rollback_serves_the_restored_version(
    kept: EngineSettings, root: Path
) -> None:
    """The drafter that was pushed after it stays."""
    engine = Pushable(kept)
    for path, version, role in (
        ("new", "v1", "target"),
        ("newer", "v2", "target"),
        ("new-drafter", "d1", "drafter"),
    ):
        engine.push(root / path, version, role=role)
    assert engine.roll_back("v1").result == "rolled_back"
    sums = engine.checksums()
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.drafter_version) == ("v1", "d1")
    assert again.checksums() == sums
    again.push(root / "newer", "v2")
    again.push(root / "new", "v3")
    folders = {path.name for path in (Path(kept.state_dir) / "weights").glob("push-*")}
    again.until(
        lambda: len(list((Path(kept.state_dir) / "weights").glob("push-*"))) <= 3,
        f"cleaning of {folders}",
    )


def test_unrecordable_commit_leaves_the_active_version(kept: EngineSettings, root: Path) -> None:
    engine = Pushable(kept)
    spool = Path(kept.state_dir) / "weights"
    assert engine.push(root / "new", "v1").result == "committed"
    sums, generated = engine.checksums(), engine.run(request())
    (spool / "current.json.new").mkdir()
    report = engine.push(root / "newer", "v2")
    assert report.result == "push_failed" and "state directory" in why(report)
    assert engine.roll_back().result == "push_failed"
    assert engine.checksums() == sums
    assert engine.run(request()) == generated
    assert engine.spans("r0")[0][0] == "v1"
    (spool / "current.json.new").rmdir()
    assert Pushable(kept).checksums() == sums, "and a restart serves what is live"
    assert len(list(spool.glob("push-*"))) == 1, "nothing is left of what was not committed"
    assert engine.push(root / "newer", "v2").result == "committed"
    shutil.rmtree(spool)
    assert engine.push(root / "new", "v3").result == "push_failed"


def break_spooled(kept: EngineSettings, role: str) -> Path:
    (file,) = (Path(kept.state_dir) / "weights").glob(f"push-*/{role}/00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_unrecordable_name_keeps_the_record_of_the_staged_push(
    kept: EngineSettings, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Pushable(kept)
    assert engine.push(root / "new", "v1").result == "committed"
    for fails in ("fsync", "write"):
        assert engine.push(root / "newer", f"by {fails}", commit=False).result == "staged"
        with monkeypatch.context() as patched:
            if fails == "fsync":
                patched.setattr(os, "fsync", full)
            else:
                patched.setattr(msgspec.json, "encode", full)
            engine.engine.send(CommitWeights(fails, f"by {fails}", "another"))
            assert engine.report(fails).result == "push_failed"
        assert engine.commit(f"by {fails}").result == "committed"
        assert Pushable(kept).info.weight_version == f"by {fails}"


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_lost_version_is_named_and_the_initial_model_is_loaded(
    kept: EngineSettings, root: Path
) -> None:
    Pushable(kept).push(root / "new", "v1")
    file = break_spooled(kept, "target")
    again = Pushable(kept)
    assert again.info.weight_version == "initial"
    assert again.info.spooled
    assert list(again.info.lost) == ["target"]
    assert "'v1' of the target is lost" in again.info.lost["target"]
    assert str(file.parents[2]) in again.info.lost["target"]
    file.unlink()
    assert list(Pushable(kept).info.lost) == ["target"]
    (Path(kept.state_dir) / "weights" / "current.json").write_text("{")
    with pytest.raises(StartupError, match="current.json is damaged"):
        Pushable(kept)


def test_a_lost_version_stays_lost_until_its_role_is_pushed(
    kept: EngineSettings, root: Path
) -> None:
    Pushable(kept).push(root / "new", "v1")
    file = break_spooled(kept, "target")
    again = Pushable(kept)
    assert again.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    again.roll_back()
    again.push(root / "new-drafter", "d2", role="drafter")
    again.until(
        lambda: len(list((Path(kept.state_dir) / "weights").glob("push-*"))) <= 3, "cleaning"
    )
    assert file.exists(), "what is lost may still be mended"
    after = Pushable(kept)
    assert list(after.info.lost) == ["target"] and after.info.drafter_version == "d2"
    assert after.push(root / "newer", "v2").result == "committed"
    last = Pushable(kept)
    assert not last.info.lost
    assert (last.info.weight_version, last.info.drafter_version) == ("v2", "d2")


def test_lost_drafter_version_is_named(kept: EngineSettings, root: Path) -> None:
    Pushable(kept).push(root / "new", "both", role="all", drafter_path=str(root / "new-drafter"))
    break_spooled(kept, "drafter")
    again = Pushable(kept)
    assert list(again.info.lost) == ["drafter"]
    assert (again.info.weight_version, again.info.drafter_version) == ("both", "initial")


def test_live_version_name_survives_other_role_pushes(
    engine: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.weights.versions.REMEMBERED", 2)
    assert engine.push(root / "new-drafter", "d", role="drafter").result == "committed"
    for version in ("1", "2", "3"):
        assert (
            engine.push(root / ("new" if version != "2" else "base"), version).result == "committed"
        )
    other = engine.push(root / "drafter", "d", role="drafter")
    words = "conflict: version 'd' of the drafter was pushed before with other content"
    assert why(other).startswith(words)


def test_commit_of_one_role_ignores_the_others_active_version(
    kept: EngineSettings, root: Path
) -> None:
    engine = Pushable(kept)
    assert engine.push(root / "new", "v1").result == "committed"
    assert engine.commit("v1").result == "unchanged"
    assert Pushable(kept).commit("v1").result == "unchanged", (
        "nor does a restart lose what was committed"
    )
    assert engine.push(root / "new-drafter", "v1", role="drafter", commit=False).result == "staged"
    assert engine.abort("v1").result == "aborted"
    assert engine.commit("v1").result == "not_found", "what was pushed last by this name is gone"
    assert engine.push(root / "new", "v1").result == "unchanged"
    assert engine.commit("v1").result == "unchanged"
