"""The safetensors files of a pushed directory: an index with shards, or one file. Each is read once, whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.source import Source

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shard(NamedTuple):
    file: str
    data: bytes
    tensors: dict[str, Tensor]


class Checkpoint:
    """`names` (tensor -> file) is known before any shard is read; `shards` then reads them one after another."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._first: Shard | None = None
        self._expected: dict[str, set[str]] = {}
        if source.has(INDEX):
            weight_map = source.read_json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or not all(_plain(file) for file in weight_map.values()):
                raise ContentRefused(f"{source.path / INDEX}: 'weight_map' must give each tensor a file name in this directory; "
                                     "write it again")
            self.names: dict[str, Path] = {name: source.path / file for name, file in weight_map.items()}
            for name, file in weight_map.items():
                self._expected.setdefault(file, set()).add(name)
        else:
            self._first = self._read(SINGLE)
            self.names = dict.fromkeys(self._first.tensors, source.path / SINGLE)

    def shards(self) -> Iterator[Shard]:
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        for file, expected in self._expected.items():
            shard = self._read(file)
            for name in sorted(expected ^ set(shard.tensors)):
                where = "index places it there" if name in expected else "index does not list it"
                raise ContentRefused(f"{self._source.path / file}: tensor {name!r} does not fit: the {where}; write index and shards "
                                     "together")
            yield shard

    def _read(self, file: str) -> Shard:
        data = self._source.read(file)
        return Shard(file, data, parsed(data, str(self._source.path / file)))


def parsed(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ContentRefused(f"{where}: not a whole safetensors file ({error}); it is truncated or damaged: write it again") from None


def _plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and "\0" not in file
