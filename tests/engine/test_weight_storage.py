"""Where a pushed version lies while it is staged, and what a restart finds of one that came in several files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import SMALLEST, write_target
from tlt_client.channels.disk import write
from tlt_server.engine.devices.cpu import CpuDevice
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import PushFailed
from tlt_server.records import GenerateRequest, Sampling
from tlt_server.weights.storage import Free, Storage, choose

MIB = 2**20


@pytest.mark.parametrize("asked, free, place", [
    ("auto", Free(10, 10, 10), "device"), ("auto", Free(9, 10, 10), "host"), ("auto", Free(9, 9, 10), "disk"),
    ("host", Free(10, 10, 10), "host"), ("disk", Free(10, 10, 10), "disk"), ("device", Free(10, 0, 0), "device"),
])
def test_the_first_place_with_room_is_taken_or_the_one_asked_for(asked: str, free: Free, place: str) -> None:
    assert choose(asked, 10 * MIB, Free(*(MIB * n for n in free))) == place  # type: ignore[arg-type]


@pytest.mark.parametrize("asked, free", [("auto", Free(9, 9, 9)), ("device", Free(9, 10, 10)), ("disk", Free(10, 10, 0))])
def test_without_room_the_refusal_says_how_much_is_lacking_and_where(asked: str, free: Free) -> None:
    with pytest.raises(PushFailed, match="takes 10 MiB.*--weight-staging none"):
        choose(asked, 10 * MIB, Free(*(MIB * n for n in free)))  # type: ignore[arg-type]


def test_storage_on_disk_is_mapped_files_without_names(tmp_path: Path) -> None:
    storage = Storage("disk", lambda: Free(0, 0, MIB), torch.device("cpu"), tmp_path / "staged")
    with storage.at(100):
        made = [torch.zeros(3, 4), torch.ones(5), torch.empty((2, 2), dtype=torch.bfloat16), torch.zeros(0)]
    assert [tuple(t.shape) for t in made] == [(3, 4), (5,), (2, 2), (0,)] and made[2].dtype == torch.bfloat16
    assert made[0].sum() == 0 and made[1].sum() == 5 and list((tmp_path / "staged").iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) >= 3, "it is not the process's own memory"
    assert torch.zeros(2).sum() == 0, "outside, storage is ordinary"


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    write_target(tmp_path / "base", shape=SMALLEST)
    perturbed(tmp_path / "base", tmp_path / "root" / "new", 1)
    return EngineSettings(model=str(tmp_path / "base"), drafter="none", policy="off", kv_memory_mb=4, threads=1,
                          weight_root=str(tmp_path / "root"), state_dir=str(tmp_path / "state"))


def test_a_version_staged_on_disk_is_committed_and_rolled_back(settings: EngineSettings) -> None:
    plain = Pushable(settings)
    sums = plain.push("new", "v").checksums
    engine = Pushable(msgspec.structs.replace(settings, weight_staging="disk", state_dir=settings.state_dir + "-2"))
    before = engine.checksums()
    assert engine.push("new", "v").checksums == sums == engine.checksums() != before
    assert engine.engine.pushes.transaction._options.storage.place == "disk"
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before


def test_without_room_a_push_fails_and_changes_nothing(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free", lambda self: Free(0, 0, 0))
    engine = Pushable(settings)
    before = engine.checksums()
    report = engine.push("new", "v")
    assert report.result == "push_failed" and report.error and "free are 0 MiB (device)" in report.error[1]
    assert engine.checksums() == before


def test_a_restart_finds_what_came_in_several_files(settings: EngineSettings) -> None:
    root, engine = Path(settings.weight_root), Pushable(settings)
    tensors = load_file(root / "new" / "model.safetensors")
    (root / "sharded").mkdir()
    write(tensors.items(), root / "sharded", max_file_bytes=2**14)
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    sums = engine.push("sharded", "v").checksums
    again = Pushable(settings)
    assert again.info.weight_version == "v" and again.info.lost == {} and again.checksums() == sums


def test_in_place_requests_that_run_go_on_with_the_new_version(settings: EngineSettings) -> None:
    engine = Pushable(msgspec.structs.replace(settings, weight_staging="none"))
    engine.submit(GenerateRequest(id="r", token_ids=[5, 6, 7], seed=3, sampling=Sampling(max_tokens=30, ignore_eos=True)))
    engine.step(8)
    assert engine.push("new", "v").result == "committed"
    engine.finish()
    spans = engine.spans("r")
    assert [version for version, _, _ in spans] == ["initial", "v"] and spans[-1][2] == 30
    assert engine.roll_back().result == "conflict", "what would be rolled back to was written over"
    refused = engine.push("new", "w", commit=False)
    assert refused.result == "invalid_request" and refused.error and "commit true" in refused.error[1]
