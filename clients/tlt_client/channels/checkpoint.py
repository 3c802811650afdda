"""Safetensors files of a push: all headers are read first, then each file once, one bucket of
tensors at a time into the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import DTYPES, MAX_QUOTE, header_bytes, tensors_of
from tlt_client.channels.source import OpenFile, Source, changed
from tlt_client.channels.tensors import TensorSpec, buckets, raw, size_of, spec_of, unpacked

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A LoRA adapter in PEFT's layout
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# A drafter's calibration table. Other engines read every *.safetensors file of a directory as
# weights, so it has another ending.
CALIBRATION = "calibration.json"
BUCKET_BYTES = 64 * 2**20  # a bucket closes after the tensor that takes it over this


class _Index(Struct):
    weight_map: dict[str, str]


_index = msgspec.json.Decoder(_Index)


class FileBucket(NamedTuple):
    """A bucket of a file; the next one overwrites its memory."""

    path: Path
    tensors: dict[str, Tensor]


class Files:
    """Safetensors files of a directory. `specs` maps a file to its tensors in the order of their
    bytes; it is known before any tensor is read.
    """

    def __init__(self, source: Source, files: Collection[str]) -> None:
        self._source = source
        self.specs: dict[str, list[TensorSpec]] = {}
        for file in files:
            with shard(source, file) as opened:
                self.specs[file] = opened.specs

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket, the memory needed to read."""
        return max(
            (
                size_of(bucket)
                for specs in self.specs.values()
                for bucket in buckets(specs, BUCKET_BYTES)
            ),
            default=0,
        )

    def batches(self) -> Iterator[FileBucket]:
        import torch

        data = torch.empty(self.largest, dtype=torch.uint8)
        for file, specs in self.specs.items():
            with shard(self._source, file) as opened:
                if opened.specs != specs:
                    raise changed(opened.reading.path)
                for bucket in buckets(specs, BUCKET_BYTES):
                    opened.reading.into(raw(data[: size_of(bucket)]))
                    yield FileBucket(opened.reading.path, unpacked(bucket, data))


def checkpoint(source: Source) -> Files:
    """Return the shards that an index lists, or the one file."""
    if not source.has(INDEX):
        if source.has(ADAPTER_CONFIG) and not source.has(SINGLE):
            raise ContentRefused(
                f"{source.path} holds a LoRA adapter ({ADAPTER_CONFIG}), not a model's weights; "
                "push it with role adapter, or load it by POST /load_lora_adapter"
            )
        return Files(source, [SINGLE])
    expected: dict[str, set[str]] = {}
    for name, file in _weight_map(source).items():
        expected.setdefault(file, set()).add(name)
    files = Files(source, expected)
    for file, specs in files.specs.items():
        for name in sorted(expected[file] ^ {held.name for held in specs}):
            where = "index places it there" if name in expected[file] else "index does not list it"
            raise ContentRefused(
                f"{source.path / file}: tensor {name[:MAX_QUOTE]!r} does not fit: the {where}; "
                "write index and shards together"
            )
    return files


def _weight_map(source: Source) -> Mapping[str, str]:
    try:
        weight_map = _index.decode(source.read(INDEX)).weight_map
        if not weight_map or not all(map(_plain, set(weight_map.values()))):
            raise ValueError("it is empty, or names another directory")
    except (ValueError, RecursionError) as error:
        raise ContentRefused(
            f"{source.path / INDEX}: 'weight_map' must give each tensor a file name in this "
            f"directory ({error}); write it again"
        ) from None
    return weight_map


class Shard(NamedTuple):
    """One open file."""

    specs: list[TensorSpec]  # in the order of their bytes
    reading: OpenFile


@contextmanager
def shard(source: Source, file: str) -> Iterator[Shard]:
    """Open a safetensors file of the directory and read its header."""
    with source.opened(file) as reading:
        try:
            whole = reading.left
            size = header_bytes(reading.read(min(8, whole)), whole)
            entries = tensors_of(reading.read(size), reading.left)
        except ValueError as error:
            raise ContentRefused(
                f"{reading.path}: not a whole safetensors file ({error}); it is truncated or "
                "damaged: write it again"
            ) from None
        yield Shard(
            [spec_of(name, DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()],
            reading,
        )


def _plain(file: str) -> bool:
    return Path(file).name == file and "\0" not in file
