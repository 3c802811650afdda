"""Safetensors files as pushes read and keep them, against the format's own library; and headers
that do not say what the bytes are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from tlt_client.channels import checkpoint as files
from tlt_client.channels import source
from tlt_client.channels.checkpoint import checkpoint, shard
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import DTYPES, opened
from tlt_client.channels.source import Source
from tlt_client.channels.tensors import Joined, written

shapes = st.lists(st.integers(0, 5), max_size=3)
models = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(DTYPES.values())), shapes),
    min_size=1,
    max_size=8,
)


def made(model: dict[str, tuple[str, list[int]]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, 2, shape, generator=generator).to(getattr(torch, dtype))
        for name, (dtype, shape) in model.items()
    }


def read(directory: Path, data: bytes) -> dict[str, Tensor]:
    (directory / "model.safetensors").write_bytes(data)
    return {
        name: tensor.clone()
        for came in checkpoint(Source(directory, ".")).batches()
        for name, tensor in came.tensors.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and a.double().equal(b.double())
        for a, b in ((one[name], other[name]) for name in one)
    )


@given(model=models, bucket_bytes=st.integers(1, 100))
def test_file_written_by_the_library_is_read_in_buckets(
    model: dict[str, tuple[str, list[int]]],
    bucket_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = made(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BUCKET_BYTES", bucket_bytes)
        assert same(read(tmp_path_factory.mktemp("files"), save(tensors)), tensors)


@given(pieces=st.lists(st.binary(max_size=5)), start=st.integers(0, 30), stop=st.integers(0, 30))
def test_joined_buffers_read_like_one_buffer(pieces: list[bytes], start: int, stop: int) -> None:
    joined, whole = Joined(memoryview(piece) for piece in pieces), b"".join(pieces)
    assert len(joined) == len(whole) and joined[start:stop] == whole[start:stop]


@given(model=models)
def test_written_file_is_read_by_the_library(model: dict[str, tuple[str, list[int]]]) -> None:
    tensors = made(model)
    assert same(load(b"".join(written(tensors))), tensors)


def entry(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields


second = entry(data_offsets=[8, 16])
HEADERS: dict[str, Any] = {
    "a list": [],
    "a word for an entry": {"a": "F32", "b": second},
    "an entry without a dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}, "b": second},
    "a dtype that is none": {"a": entry(dtype="F99"), "b": second},
    "a dtype that is a list": {"a": entry(dtype=["F32"]), "b": second},
    "two tensors of the same bytes": {"a": entry(), "b": entry(), "c": second},
    "two tensors that overlap": {"a": entry(shape=[3], data_offsets=[0, 12]), "b": second},
    "a gap": {"a": entry(), "b": entry(shape=[1], data_offsets=[12, 16])},
    "bytes after the last": {"a": entry()},
    "bytes that are not there": {"a": entry(), "b": entry(shape=[4], data_offsets=[8, 24])},
    "a shape of other bytes": {"a": entry(shape=[3]), "b": second},
    "negative numbers": {"a": entry(shape=[-1, -2]), "b": second},
    "offsets the wrong way": {"a": entry(data_offsets=[8, 0]), "b": second},
    "three offsets": {"a": entry(data_offsets=[0, 4, 8]), "b": second},
    "fractions": {"a": entry(shape=[2.0]), "b": second},
    "truths": {"a": entry(shape=[True, 2]), "b": second},
    "a shape beyond any machine": {"a": entry(shape=[2**62, 2**62]), "b": second},
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("reading", ["for a push", "to be sent"])
def test_header_that_contradicts_the_file_size_is_refused(
    reading: str, name: str, tmp_path: Path
) -> None:
    refused(reading, json.dumps(HEADERS[name]), tmp_path)


TWICE = json.dumps({"a": entry(), "b": second}).replace('"b"', '"a"')


@pytest.mark.parametrize(
    "text",
    [TWICE, "[" * 100_000, "{", "", "\xff"],
    ids=["a name twice", "deep", "cut", "empty", "no JSON"],
)
@pytest.mark.parametrize("reading", ["for a push", "to be sent"])
def test_malformed_header_is_refused(reading: str, text: str, tmp_path: Path) -> None:
    refused(reading, text, tmp_path)


def refused(reading: str, header: str, directory: Path, why: str = "") -> str:
    data = header.encode("latin-1")
    file = directory / "model.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(16))
    with pytest.raises(
        ContentRefused, match=rf"model\.safetensors: not a whole safetensors file.*{why}"
    ) as caught:
        if reading == "for a push":
            checkpoint(Source(directory, "."))
        else:
            with opened(file):
                pass
    return str(caught.value)


# Digits are the most that Python's own reader takes, and its product of many takes for ever.
NINES = "9" * 4300
BOMBS = {  # what would keep the interpreter busy -> what is said of it
    "numbers of 4300 digits": (
        json.dumps({"a": entry()}).replace("[2]", "[" + ",".join([NINES] * 200) + "]"),
        "tensor 'a'",
    ),
    "a number beyond any tensor": (json.dumps({"a": entry(shape=[2**48 + 1])}), f"<= {2**48}"),
    "many dimensions": (json.dumps({"a": entry(shape=[1] * 400_000)}), "length <= 8"),
    "many lists": ('{"a":[' + ",".join(["[]"] * 1_000_000) + "]}", "Expected `object`"),
    "many entries that are none": (
        "{" + ",".join(f'"{i}":[]' for i in range(200_000)) + "}",
        "tensor '0'",
    ),
    "a long name": (
        json.dumps({"a" * 10**6: entry(data_offsets=[0, 16])}),
        "1000000 characters, the limit is 256",
    ),
    "a long dtype": (json.dumps({"a": entry(dtype="F" * 10**6)}), "length <= 16"),
    "a long header": (
        json.dumps({"__metadata__": {"a": "b" * 4 * 2**20}}),
        "the limit is 4194304: put the tensors into several",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("reading", ["for a push", "to be sent"])
def test_malicious_header_is_refused_at_once_and_not_quoted(
    reading: str, name: str, tmp_path: Path
) -> None:
    header, why = BOMBS[name]
    began = time.process_time()
    said = refused(reading, header, tmp_path, why)
    assert time.process_time() - began < 0.5, "of some seconds to hours"
    assert len(said) - len(str(tmp_path)) < 500


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size - 4),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 4),
    "replaced": lambda file: (
        file.rename(file.with_suffix(".old")),
        file.write_bytes(file.with_suffix(".old").read_bytes()),
    ),
    "touched": lambda file: os.utime(file, ns=(1, 1)),
}


@pytest.mark.parametrize("when", ["before its tensors are read", "between two buckets"])
@pytest.mark.parametrize("name", CHANGES)
def test_file_changed_while_read_is_refused(
    name: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BUCKET_BYTES", 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(save({name: torch.ones(4) for name in "ab"}))
    shards = checkpoint(Source(tmp_path, "."))
    if when == "before its tensors are read":
        CHANGES[name](file)
    with pytest.raises(
        ContentRefused, match=r"changed while it was read|not a whole safetensors file"
    ):
        for count, _ in enumerate(shards.batches()):
            if count == 0 and when == "between two buckets":
                CHANGES[name](file)


def test_oversized_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", source.MAX_SMALL_BYTES + 1)
    with pytest.raises(ContentRefused, match="the limit is 16777216"):
        Source(tmp_path, ".").read("config.json")


def test_file_descriptor_is_closed_on_every_outcome(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ContentRefused), shard(Source(tmp_path, "."), "model.safetensors"):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_harmful_config_or_index_is_refused_at_once(tmp_path: Path) -> None:
    lists = b'{"weight_map":{"a":[' + b",".join([b"[]"] * 5_000_000) + b"]}}"
    (tmp_path / "model.safetensors.index.json").write_bytes(lists)
    began = time.process_time()
    with pytest.raises(ContentRefused, match="Expected `str`, got `array`"):
        checkpoint(Source(tmp_path, "."))
    with pytest.raises(ContentRefused, match=f"it has {len(lists)} bytes, the limit is 1048576"):
        source.json_object(lists, "config.json")
    assert time.process_time() - began < 0.5, "of some seconds"
