"""Weights that sleep: their bytes in a file without a name, their tensors without memory, until a
wake-up.

The same tensors come back, with the same bits, so holders of a network or of a view of it notice
nothing. Nothing may read them meanwhile, which the loop ensures.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from tlt_server.attention.backing import Backing, give_back
from tlt_server.errors import Conflict, EngineFailed, StorageFailed
from tlt_server.models.shards import tensors_of
from tlt_server.weights.checksums import checksum
from tlt_server.weights.parts import Changed, Live


class _Stored(NamedTuple):
    backing: Backing
    checksum: str


class Dormant:
    def __init__(self, directory: Path | None) -> None:
        """Keep the file in `directory`; None: where the system keeps temporary files."""
        self._directory = directory
        self._file: BinaryIO | None = None
        self._stored: list[_Stored] = []

    def put_away(self, *parts: Live | Changed) -> None:
        """Write the weights to the file and free their memory. `StorageFailed`, and no change, when
        the disk has no room; `Conflict` where several GPUs share them.
        """
        assert self._file is None, "they sleep already"
        networks = [part.network for several in parts for part in several.by_role.values()]
        backings = {
            view.untyped_storage().data_ptr(): Backing(view)
            for network in networks
            for stored in network.parameters().values()
            for view in tensors_of(stored)
        }
        if any(backing.lent for backing in backings.values()):
            raise Conflict(
                "the weights lie on several GPUs (tensor_parallel), whose processes have them "
                "mapped, so they cannot sleep; put only the KV to sleep (level 1)"
            )
        stored = []
        try:
            file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (stays open until they are back)
            for backing in backings.values():
                content = backing.bytes.cpu()
                file.write(memoryview(content.numpy()))  # type: ignore[arg-type]
                stored.append(_Stored(backing, checksum("xxh3", content)))
            file.flush()
        except OSError as error:
            raise StorageFailed(
                f"the weights cannot be kept in {self._directory or tempfile.gettempdir()} while "
                f"they sleep ({error}), so they stay where they are; make room there, or put only "
                "the KV to sleep (level 1)"
            ) from None
        for each in stored:
            each.backing.free()
        give_back()
        self._file, self._stored = file, stored

    def bring_back(self) -> None:
        """Read the weights back. `torch.OutOfMemoryError`, and they sleep on, when there is no
        room.
        """
        assert self._file is not None, "they do not sleep"
        try:
            for each in self._stored:
                each.backing.reclaim()
        except torch.OutOfMemoryError:
            for each in self._stored:
                each.backing.free()
            raise
        self._file.seek(0)
        for each in self._stored:
            content = torch.empty(each.backing.size, dtype=torch.uint8)
            read = self._file.readinto(memoryview(content.numpy()))  # type: ignore[attr-defined, arg-type]
            if read != len(content) or checksum("xxh3", content) != each.checksum:
                raise EngineFailed(
                    "the file with the sleeping weights has changed; the engine has to start again"
                )
            each.backing.bytes.copy_(content)
        self._file.close()
        self._file, self._stored = None, []
