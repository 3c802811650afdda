"""Sleeping weights: their bytes are in an unnamed file, and their tensors have no memory until a
wake-up.

The same tensor objects return with the same bits, so holders of a network or of a view need no
change. Only tensors on worker ranks' GPUs change address. The loop ensures that nothing reads the
weights meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from tlt_server.attention.backing import Backing, give_back
from tlt_server.errors import EngineFailed, StorageFailed
from tlt_server.models.shards import tensors_of
from tlt_server.models.split import WHOLE
from tlt_server.weights.checksums import checksum
from tlt_server.weights.parts import Changed, Live

TILE_BYTES = 2**28  # the host holds one tile at a time


class SleepingMemory(Protocol):
    """Memory of weights that is released and reclaimed as a unit."""

    @property
    def contents(self) -> list[Tensor]:
        """Return uint8 views of the whole memory."""

    def free(self) -> None: ...

    def reclaim(self) -> None:
        """Reclaim the memory, with undefined content; `torch.OutOfMemoryError` if there is too
        little.
        """


class Dormant:
    def __init__(self, directory: Path | None) -> None:
        """`directory`: of the file; None: the system's directory for temporary files."""
        self._directory = directory
        self._file: BinaryIO | None = None
        self._memory: list[SleepingMemory] = []
        self._checksums: list[str] = []  # one for each tile in the file

    def put_away(self, *parts: Live | Changed) -> None:
        """Write the weights to the file and free their memory, on all ranks. If the disk is full,
        raise `StorageFailed` and change nothing.
        """
        assert self._file is None, "they sleep already"
        memory = _memory_of(part.network for several in parts for part in several.by_role.values())
        checksums = []
        try:
            file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (stays open until they are back)
            for tile in _tiles(memory):
                content = tile.cpu()
                file.write(memoryview(content.numpy()))  # type: ignore[arg-type]
                checksums.append(checksum("xxh3", content))
            file.flush()
        except OSError as error:
            raise StorageFailed(
                f"the weights cannot be kept in {self._directory or tempfile.gettempdir()} while "
                f"they sleep ({error}), so they stay where they are; make room there, or put only "
                "the KV to sleep (level 1)"
            ) from None
        for each in memory:
            each.free()
        give_back()
        self._file, self._memory, self._checksums = file, memory, checksums

    def bring_back(self) -> None:
        """Read the weights back. If memory is too small, raise `torch.OutOfMemoryError` and leave
        them asleep.
        """
        assert self._file is not None, "they do not sleep"
        try:
            for each in self._memory:
                each.reclaim()
        except torch.OutOfMemoryError:
            for each in self._memory:
                each.free()
            raise
        self._file.seek(0)
        for tile, expected in zip(_tiles(self._memory), self._checksums, strict=True):
            content = torch.empty(len(tile), dtype=torch.uint8)
            read = self._file.readinto(memoryview(content.numpy()))  # type: ignore[attr-defined, arg-type]
            if read != len(content) or checksum("xxh3", content) != expected:
                raise EngineFailed(
                    "the file with the sleeping weights has changed; the engine has to start again"
                )
            tile.copy_(content)
        self._file.close()
        self._file, self._memory, self._checksums = None, [], []


def _memory_of(networks: Iterable[Any]) -> list[SleepingMemory]:
    """Return the memory of these networks without duplicates. Shards that one model shares across
    ranks count once.
    """
    found: dict[object, SleepingMemory] = {}
    for network in networks:
        lent = getattr(network, "split", WHOLE).lent
        if lent is not None:
            found[lent] = lent
        parameters = network.parameters() if lent is None else network.own_parameters()
        for stored in parameters.values():
            for view in tensors_of(stored):
                found[view.untyped_storage().data_ptr()] = Backing(view)
    return [*found.values()]


def _tiles(memory: Iterable[SleepingMemory]) -> Iterator[Tensor]:
    for each in memory:
        for content in each.contents:
            yield from content.split(TILE_BYTES)
