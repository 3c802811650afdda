"""Weights that sleep: their bytes in a file that has no name, their tensors without memory, until
they are wanted again.

The same tensors come back, with the same bits, so whoever holds a network or a view of it need not
be told. Nothing may read them meanwhile; the loop sees to that.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from tlt_server.attention.backing import Backing, give_back
from tlt_server.errors import EngineFailed, StorageFailed
from tlt_server.weights.checksums import checksum
from tlt_server.weights.parts import Changed, Live


class _Place(NamedTuple):
    backing: Backing
    checksum: str


class Dormant:
    def __init__(self, directory: Path | None) -> None:
        """`directory`: of the file; None: where the system keeps temporary files."""
        self._directory = directory
        self._file: BinaryIO | None = None
        self._places: list[_Place] = []

    def put_away(self, *parts: Live | Changed) -> None:
        """`StorageFailed`, and nothing has changed, when the disk does not hold them."""
        assert self._file is None, "they sleep already"
        networks = [part.network for several in parts for part in several.by_role.values()]
        backings = {
            view.untyped_storage().data_ptr(): Backing(view)
            for network in networks
            for view in network.parameters().values()
        }
        places = []
        try:
            file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (it stays open until they are back)
            for backing in backings.values():
                content = backing.bytes.cpu()
                file.write(memoryview(content.numpy()))  # type: ignore[arg-type]
                places.append(_Place(backing, checksum("xxh3", content)))
            file.flush()
        except OSError as error:
            raise StorageFailed(
                f"the weights cannot be kept in {self._directory or tempfile.gettempdir()} while they sleep ({error}), so "
                "they stay where they are; make room there, or put only the KV to sleep (level 1)"
            ) from None
        for place in places:
            place.backing.free()
        give_back()
        self._file, self._places = file, places

    def bring_back(self) -> None:
        """`torch.OutOfMemoryError`, and they sleep on, when there is no room for them."""
        assert self._file is not None, "they do not sleep"
        try:
            for place in self._places:
                place.backing.reclaim()
        except torch.OutOfMemoryError:
            for place in self._places:
                place.backing.free()
            raise
        self._file.seek(0)
        for place in self._places:
            content = torch.empty(place.backing.size, dtype=torch.uint8)
            read = self._file.readinto(memoryview(content.numpy()))  # type: ignore[attr-defined, arg-type]
            if read != len(content) or checksum("xxh3", content) != place.checksum:
                raise EngineFailed(
                    "the weights that slept in a file have changed there; the engine has to start again"
                )
            place.backing.bytes.copy_(content)
        self._file.close()
        self._file, self._places = None, []
