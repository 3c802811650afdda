"""The place of a pushed version while it is staged, and its restart from several files."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, cpu_settings, perturbed, small_request
from tests.engine.tiny import SMALLEST, write_target
from tests.waiting import until
from tlt_client.channels import Buffers, cuda
from tlt_client.channels.disk import write
from tlt_server.attention import backing
from tlt_server.attention.pinned import pinned
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import PushFailed
from tlt_server.process import machine
from tlt_server.weights.storage import Free, Storage, choose
from tlt_server.wire.commands import Sleep, WakeUp

MIB = 2**20


class Pins:
    """Stands in for the CUDA runtime and records pinned memory."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.sizes: list[int] = []

    def pin(self, pointer: int, size: int) -> None:
        assert pointer % mmap.PAGESIZE == 0 and pointer not in self.held
        self.held.add(pointer)
        self.sizes.append(size)

    def count(self, expected: int) -> bool:
        """Return True once exactly this many are held; a thread frees the dropped ones."""
        gc.collect()
        until(lambda: len(self.held) == expected, within_s=60)
        return True

    def fail(self, pointer: int, size: int) -> None:
        raise RuntimeError("cudaHostRegister failed (out of memory)")


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    pins = Pins()
    monkeypatch.setattr(cuda, "pin", pins.pin)
    monkeypatch.setattr(cuda, "unpin", pins.held.remove)
    yield pins
    assert pins.count(0), "what was pinned is let go"


@pytest.mark.parametrize(
    "asked, free, places",
    [
        (None, Free(10, 10, 10), "device host disk"),
        (None, Free(9, 10, 10), "host disk"),
        (None, Free(10, 9, 10), "device disk"),
        (None, Free(9, 9, 10), "disk"),
        ("host", Free(10, 10, 10), "host"),
        ("disk", Free(10, 10, 10), "disk"),
        ("device", Free(10, 0, 0), "device"),
    ],
)
def test_staging_places_with_room_are_tried_in_order(asked: str, free: Free, places: str) -> None:
    assert choose(asked, 10 * MIB, Free(*(MIB * n for n in free))) == places.split()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "device, buffers, place",
    [
        ("cuda", Buffers(), "device"),
        ("cuda", Buffers(host=9), "host"),
        ("cuda", Buffers(device=1), "host"),
        ("cuda", Buffers(host=11, device=1), "disk"),
        ("cpu", Buffers(), "device"),
        ("cpu", Buffers(host=1), "host"),
        ("cpu", Buffers(device=1, host=1), "host"),
        ("cpu", Buffers(host=11), "disk"),
    ],
)
def test_staging_leaves_room_for_the_receivers_buffers(
    device: str, buffers: Buffers, place: str, pins: Pins, tmp_path: Path
) -> None:
    storage = storage_with(Free(10, 20, 30), tmp_path, device=device)
    storage.make(10 * MIB, Buffers(*(MIB * n for n in buffers)), lambda: torch.empty(3))
    assert storage.place == place


def storage_with(
    free: Free, directory: Path | None, asked: Any = None, device: str = "cpu"
) -> Storage:
    """`free`: in MiB."""
    found = Free(*(MIB * n for n in free))
    return Storage(asked, lambda: found, torch.device(device), directory)


V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    "files, limit, used, cached, left",
    [
        (V2, "max", 22, 1, 100),
        (V2, f"{24 * MIB}", 22, 0, 2),
        (V2, f"{24 * MIB}", 22, 5, 7),
        (V2, f"{24 * MIB}", 25, 0, 0),
        (V1, f"{2**63 - 4096}", 22, 1, 100),
        (V1, f"{24 * MIB}", 22, 5, 7),
    ],
)
def test_available_memory_excludes_that_of_the_cgroup(
    files: tuple[str, str, str],
    limit: str,
    used: int,
    cached: int,
    left: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {200 * 1024} kB\nMemAvailable: {100 * 1024} kB\n")
    (tmp_path / files[0]).write_text(f"{limit}\n")
    (tmp_path / files[1]).write_text(f"{used * MIB}\n")
    statistics = f"anon 3\n{files[2]} {cached * MIB}\n"
    (tmp_path / files[1]).with_name("memory.stat").write_text(statistics)
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    assert machine.host_memory() == (left * MIB, (200 if left == 100 else 24) * MIB)


NO_ROOM = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    OSError(12, "Cannot allocate memory"),
    OSError(28, "No space left on device"),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=repr)
def test_full_staging_place_falls_back_with_a_log_line(
    error: Exception, pins: Pins, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, made = storage_with(Free(1, 1, 1), tmp_path, device="cuda"), []

    def make() -> torch.Tensor:
        made.append(torch.empty(5))
        if len(made) < 3:
            raise error
        return made[-1]

    assert storage.make(100, Buffers(), make) is made[2] and storage.place == "disk"
    assert pins.sizes == [20], "the second one was in the host's memory"
    lines = capsys.readouterr().err.splitlines()
    said = [line.partition(" after all: ")[2].partition(",")[0] for line in lines]
    assert said == ["device", "host"]
    storage = storage_with(Free(1, 1, 1), tmp_path, "device", "cuda")
    made.clear()
    with pytest.raises(PushFailed, match="could not be allocated.*--weight-staging none"):
        storage.make(100, Buffers(), make)


def test_staging_errors_other_than_shortage_are_raised_unchanged(tmp_path: Path) -> None:
    def make() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        storage_with(Free(1, 1, 1), tmp_path).make(1, Buffers(), make)


def test_full_disk_is_reported_before_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    storage = storage_with(Free(0, 0, 1), tmp_path, "disk")
    with pytest.raises(PushFailed, match="could not be allocated"):
        storage.make(100, Buffers(), lambda: torch.zeros(3))


@pytest.mark.parametrize(
    "asked, free", [(None, Free(9, 9, 9)), ("device", Free(9, 10, 10)), ("disk", Free(10, 10, 0))]
)
def test_staging_refusal_names_the_shortage_of_each_place(asked: str, free: Free) -> None:
    with pytest.raises(PushFailed, match="takes 10 MiB.*--weight-staging none"):
        choose(asked, 10 * MIB, Free(*(MIB * n for n in free)))  # type: ignore[arg-type]


def test_storage_on_disk_is_mapped_files_without_names(tmp_path: Path) -> None:
    def make() -> list[torch.Tensor]:
        halves = torch.empty((2, 2), dtype=torch.bfloat16)
        return [torch.zeros(3, 4), torch.ones(5), halves, torch.zeros(0)]

    made = storage_with(Free(0, 0, 1), tmp_path / "staged", "disk").make(100, Buffers(), make)
    assert [tuple(t.shape) for t in made] == [(3, 4), (5,), (2, 2), (0,)]
    assert made[2].dtype == torch.bfloat16
    assert made[0].sum() == 0 and made[1].sum() == 5 and list((tmp_path / "staged").iterdir()) == []
    mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
    assert mapped >= 3, "it is not the process's own memory"
    assert torch.zeros(2).sum() == 0, "outside, storage is ordinary"


def test_pinned_memory_has_its_tensors_size_and_lifetime(pins: Pins) -> None:
    def make() -> list[torch.Tensor]:
        return [torch.zeros(3, 4), torch.ones(1025, dtype=torch.bfloat16), torch.empty(0)]

    made = storage_with(Free(0, 1, 0), None, "host", "cuda").make(100, Buffers(), make)
    assert pins.sizes == [48, 2050, 1] and [tuple(t.shape) for t in made] == [(3, 4), (1025,), (0,)]
    assert made[0].sum() == 0 and made[1].sum() == 1025
    view = made[1][7:9]
    del made
    assert pins.count(1), "a view holds the whole"
    assert view.tolist() == [1, 1]
    del view
    assert pins.count(0)


def test_pinned_pages_are_unpinned_when_dropped(
    pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = pinned((2**16,), torch.float32).fill_(1)
    dropped: list[bool] = []
    sound = backing._libc.madvise
    monkeypatch.setattr(
        backing._libc, "madvise", lambda *given: dropped.append(bool(pins.held)) or sound(*given)
    )
    behind = backing.Backing(tensor)
    behind.free()
    assert set(dropped) == {False} and not pins.held and tensor.sum() == 0
    behind.free()
    with monkeypatch.context() as patched:
        patched.setattr(cuda, "pin", pins.fail)
        with pytest.raises(torch.OutOfMemoryError, match="cannot be pinned"):
            behind.reclaim()
    behind.reclaim()
    assert pins.held == {tensor.data_ptr()}


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    write_target(tmp_path / "base", shape=SMALLEST)
    perturbed(tmp_path / "base", tmp_path / "root" / "new", 1)
    return cpu_settings(
        tmp_path / "base",
        kv_memory_mb=4,
        threads=1,
        weight_root=str(tmp_path / "root"),
        state_dir=str(tmp_path / "state"),
    )


def test_a_version_staged_on_disk_is_committed_and_rolled_back(settings: EngineSettings) -> None:
    plain = Pushable(settings)
    sums = plain.push("new", "v").checksums
    engine = Pushable(replace(settings, weight_staging="disk", state_dir=f"{settings.state_dir}-2"))
    before = engine.checksums()
    assert engine.push("new", "v").checksums == sums == engine.checksums() != before
    assert engine.engine.pushes.transaction.options.storage.place == "disk"
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before


def test_weights_staged_in_pinned_memory_can_sleep(settings: EngineSettings, pins: Pins) -> None:
    """The pinned version itself is live then on a CPU; on a GPU it holds the one before."""
    engine = Pushable(replace(settings, weight_staging="host"))
    engine.engine.pushes.transaction.options.storage._device = torch.device("cuda")
    assert engine.push("new", "v").result == "committed"
    sums, held = engine.checksums(), set(pins.held)
    assert held
    engine.engine.send(Sleep("s", ["weights", "kv_cache"]))
    engine.step(2)
    assert not pins.held
    engine.engine.send(WakeUp("w", ["weights", "kv_cache"]))
    engine.step(2)
    assert [report.error for report in engine.engine.control_reports()] == [None, None]
    assert pins.held == held and engine.checksums() == sums
    assert engine.roll_back().result == "rolled_back" and engine.checksums() != sums


def test_restart_finds_a_version_pushed_in_several_files(settings: EngineSettings) -> None:
    root, engine = Path(settings.weight_root), Pushable(settings)
    tensors = load_file(root / "new" / "model.safetensors")
    (root / "sharded").mkdir()
    write(tensors.items(), root / "sharded", max_file_bytes=2**14)
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    sums = engine.push("sharded", "v").checksums
    again = Pushable(settings)
    assert again.info.weight_version == "v" and again.info.lost == {} and again.checksums() == sums


def test_in_place_push_continues_running_requests(settings: EngineSettings) -> None:
    engine = Pushable(replace(settings, weight_staging="none"))
    engine.submit(small_request(30))
    engine.step(8)
    assert engine.push("new", "v").result == "committed"
    engine.finish()
    spans = engine.spans("r")
    assert [version for version, _, _ in spans] == ["initial", "v"] and spans[-1][2] == 30
    assert engine.roll_back().result == "conflict", "what would be rolled back to was written over"
    refused = engine.push("new", "w", commit=False)
    assert refused.result == "invalid_request"
    assert refused.error and "commit true" in refused.error[1]
