"""The trainer's half of http, in front of a recording client: little memory, and a checksum of each
tensor.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load, save_file

from tlt_client.channels.checkpoint import CALIBRATION
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.http import HttpSender
from tlt_client.channels.tensors import raw

CHUNK_BYTES = 2**16
TENSORS = {
    "a": torch.arange(2**20, dtype=torch.float32),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.arange(2**21),
}


class Told:
    def __init__(self, *, keeps: bool) -> None:
        self._keeps, self.parts, self.manifest = keeps, dict[str, bytearray](), dict[str, Any]()

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> dict[str, Any]:
        assert len(data) == min(CHUNK_BYTES, total - start)
        if self._keeps:
            there = self.parts.setdefault(part, bytearray())
            assert len(there) == start
            there += data
        return {"bytes": start + len(data)}

    def push_weights(self, version: str, **manifest: Any) -> dict[str, Any]:
        self.manifest = manifest
        return {}


def test_parts_are_safetensors_files_and_the_manifest_sums_each_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    by_tensors, by_files = Told(keeps=True), Told(keeps=True)
    HttpSender(by_tensors, max_file_bytes=2**23, chunk_bytes=CHUNK_BYTES).push(TENSORS.items(), "v")  # type: ignore[arg-type]
    HttpSender(by_files, chunk_bytes=CHUNK_BYTES).push_directory(tmp_path, "v")  # type: ignore[arg-type]
    assert (len(by_tensors.parts), len(by_files.parts)) == (2, 1)
    for told in (by_tensors, by_files):
        came = {
            name: tensor
            for data in told.parts.values()
            for name, tensor in load(bytes(data)).items()
        }
        assert came.keys() == TENSORS.keys()
        assert all(came[name].equal(TENSORS[name]) for name in came)
        sums = {entry["name"]: entry["checksum"] for entry in told.manifest["tensors"]}
        assert sums == {
            name: f"xxh3:{xxhash.xxh3_128_hexdigest(raw(tensor))}"
            for name, tensor in TENSORS.items()
        }


def test_directory_push_sends_calibration_but_names_only_tensors(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        save_file({"b": TENSORS["b"]}, tmp_path / name / "model.safetensors")
    (tmp_path / "drafter" / CALIBRATION).write_bytes(b"a table")
    alone, both = Told(keeps=True), Told(keeps=True)
    HttpSender(alone, chunk_bytes=CHUNK_BYTES).push_directory(tmp_path / "drafter", "v")  # type: ignore[arg-type]
    HttpSender(both, chunk_bytes=CHUNK_BYTES).push_directory(  # type: ignore[arg-type]
        tmp_path / "target", "v", drafter=tmp_path / "drafter"
    )
    assert alone.parts.keys() == {"model.safetensors", CALIBRATION}
    assert both.parts.keys() == {"model.safetensors", "drafter-model.safetensors", CALIBRATION}
    for told, names in ((alone, ["b"]), (both, ["b", "draft.b"])):
        assert told.parts[CALIBRATION] == b"a table"
        assert [entry["name"] for entry in told.manifest["tensors"]] == names


@pytest.mark.parametrize("max_file_bytes", [2**20, 2**30])
def test_a_push_takes_the_memory_of_chunks_and_not_of_files(max_file_bytes: int) -> None:
    told = Told(keeps=False)
    sender = HttpSender(told, max_file_bytes=max_file_bytes, chunk_bytes=CHUNK_BYTES)  # type: ignore[arg-type]
    sender.push(list(TENSORS.items())[:1], "warm")
    tracemalloc.start()
    try:
        sender.push(TENSORS.items(), "v")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES < TENSORS["a"].nbytes // 8


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_type_that_no_channel_carries_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(
        ContentRefused,
        match=f"tensor 'w' has dtype '{dtype}', which no channel carries; use one of",
    ):
        HttpSender(Told(keeps=False)).push([("w", torch.zeros(2, dtype=dtype))], "v")  # type: ignore[arg-type]
