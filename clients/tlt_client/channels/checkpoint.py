"""The safetensors files of a pushed directory: an index with shards, or one file. Each is read once, a bucket of tensors at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import DTYPES, MALFORMED, MAX_HEADER_BYTES, parsed, tensors_of
from tlt_client.channels.source import Reading, Source
from tlt_client.channels.tensors import Slot, buckets, raw, size_of, slot, unpacked

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BUCKET_BYTES = 64 * 2**20  # one closes after the tensor that takes it over this


class Shard(NamedTuple):
    """One file, open."""

    file: str
    slots: list[Slot]  # its tensors, in the order of their bytes
    reading: Reading

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """One after another in the same memory."""
        import torch

        cut = list(buckets(self.slots, BUCKET_BYTES))
        data = torch.empty(max(map(size_of, cut), default=0), dtype=torch.uint8)
        for bucket in cut:
            self.reading.into(raw(data[: size_of(bucket)]))
            yield unpacked(bucket, data)


class Checkpoint:
    """`names` (tensor -> file) is known before any tensor is read; `shards` then gives the files one after another."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._expected: dict[str, set[str]] = {}
        if source.has(INDEX):
            weight_map = source.read_json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or not all(_plain(file) for file in weight_map.values()):
                raise ContentRefused(f"{source.path / INDEX}: 'weight_map' must give each tensor a file name in this directory; "
                                     "write it again")
            for name, file in weight_map.items():
                self._expected.setdefault(file, set()).add(name)
        else:
            with shard(source, SINGLE) as single:
                self._expected[SINGLE] = {slot.name for slot in single.slots}
        self.names: dict[str, Path] = {name: source.path / file for file, names in self._expected.items() for name in names}

    def shards(self) -> Iterator[Shard]:
        """Each open until the next one is asked for."""
        for file, expected in self._expected.items():
            with shard(self._source, file) as opened:
                for name in sorted(expected ^ {slot.name for slot in opened.slots}):
                    where = "index places it there" if name in expected else "index does not list it"
                    raise ContentRefused(f"{self._source.path / file}: tensor {name!r} does not fit: the {where}; write index and shards "
                                         "together")
                yield opened


@contextmanager
def shard(source: Source, file: str) -> Iterator[Shard]:
    """A safetensors file of the directory; its header is read."""
    with source.opened(file) as reading:
        whole = reading.left
        try:
            size = int.from_bytes(reading.read(min(8, whole)), "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, reading.left):
                raise ValueError(f"a header of {size} bytes in a file of {whole}")
            header = parsed(reading.read(size))
            slots = [slot(name, DTYPES[said["dtype"]], said["shape"]) for name, said in tensors_of(header, reading.left).items()]
        except MALFORMED as error:
            raise ContentRefused(f"{reading.path}: not a whole safetensors file ({error}); it is truncated or damaged: write it "
                                 "again") from None
        yield Shard(file, slots, reading)


def _plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and "\0" not in file
