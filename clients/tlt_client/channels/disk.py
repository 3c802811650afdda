"""Channel `disk`: a safetensors directory that both trainer and engine can read.

The trainer's half writes and names it. `Client.update_weights` alone pushes a directory that
another program wrote.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_client.channels import (
    Announcement,
    Buffers,
    Intake,
    Layout,
    Receiver,
    Sender,
    TensorBatch,
    Tensors,
    pushed,
    split,
)
from tlt_client.channels.checkpoint import ADAPTER, ADAPTER_CONFIG, INDEX, SINGLE, Files, checkpoint
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.source import Source
from tlt_client.channels.tensors import FILE_BYTES, entry, files, written

if TYPE_CHECKING:
    from tlt_client.client import Client


class DiskReceiver(Receiver):
    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.root is not None
        paths = dict.fromkeys(pushed(push.role), push.path)
        if push.role == "all":
            paths["drafter"] = push.drafter_path
        self._sources = {
            role: self._opened(intake.root, path, intake.marker) for role, path in paths.items()
        }
        self._files = {
            role: Files(source, [ADAPTER])
            if role == "adapter" and not source.has(INDEX)
            else checkpoint(source)
            for role, source in self._sources.items()
        }
        self.layouts = [
            Layout(role, str(self._sources[role].path / file), spec)
            for role, shards in self._files.items()
            for file, specs in shards.specs.items()
            for spec in specs
        ]
        self.names = {
            role: {layout.spec.name: layout.where for layout in self.layouts if layout.role == role}
            for role in self._files
        }
        self.buffers = Buffers(host=max(shards.largest for shards in self._files.values()))
        self.places = {role: str(source.path) for role, source in self._sources.items()}

    @staticmethod
    def _opened(root: Path, path: str, marker: str) -> Source:
        source = Source(root, path)
        if marker and not source.has(marker):
            raise ContentRefused(
                f"{source.path} has no file {marker!r}, so its writer is not done; push it once "
                "that file is there, or start the server without --weight-marker"
            )
        return source

    def file(self, role: str, name: str) -> bytes | None:
        source = self._sources[role]
        return source.read(name) if source.has(name) else None

    def batches(self) -> Iterator[TensorBatch]:
        for role, shards in self._files.items():
            for path, tensors in shards.batches():
                yield TensorBatch(role, str(path), tensors)

    def confirm(self) -> None:
        for source in self._sources.values():
            source.confirm()


class TrainedReceiver(DiskReceiver):
    """Receives a candidate that the server's own trainer wrote into a directory of the server."""

    def __init__(self, push: Announcement, intake: Intake) -> None:
        super().__init__(push, replace(intake, root=intake.trained, marker=""))


class DiskSender(Sender):
    """Writes each push into a new directory below `root`, the server's weight root, and removes it
    after the push. A killed trainer may leave a directory `push-*` there, which does no harm.
    """

    def __init__(
        self, client: Client, root: str | Path, *, max_file_bytes: int = FILE_BYTES
    ) -> None:
        self._client, self._root, self._max_file_bytes = client, Path(root), max_file_bytes

    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        directory, held, role = (
            self._root / f"push-{secrets.token_hex(8)}",
            dict(tensors),
            fields.get("role", "target"),
        )
        self._root.mkdir(parents=True, exist_ok=True)
        _made(directory)
        try:
            paths, entries = {}, []
            for whose, names in split(held, role).items():
                folder = directory / whose
                _made(folder)
                paths["drafter_path" if (role, whose) == ("all", "drafter") else "path"] = str(
                    folder.resolve()
                )
                wrote = write(
                    ((own, held[sent]) for own, sent in names.items()), folder, self._max_file_bytes
                )
                entries += [one | {"name": names[one["name"]]} for one in wrote]
                if whose == "adapter":
                    _as_adapter(folder, fields.pop("adapter_config", {}))
            return self._client.push_weights(version, tensors=entries, **paths, **fields)
        finally:
            shutil.rmtree(directory)


def _made(directory: Path) -> None:
    """Create a directory that a server of another user may read, but only this user may write,
    under any umask. The parent directory decides who may enter.
    """
    directory.mkdir()
    directory.chmod(0o755)


def _opened(path: str, flags: int) -> int:
    """Open a file with the mode that `_made` gives a directory."""
    descriptor = os.open(path, flags, 0o644)
    os.fchmod(descriptor, 0o644)
    return descriptor


def _as_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    """Rename the written file to PEFT's layout, and write the config to its own file."""
    (folder / SINGLE).rename(folder / ADAPTER)
    with open(folder / ADAPTER_CONFIG, "w", opener=_opened) as opened:
        opened.write(json.dumps(config))


def write(
    tensors: Tensors, directory: Path, max_file_bytes: int = FILE_BYTES
) -> list[dict[str, Any]]:
    """Write safetensors files and, if there are several, their index; return the manifest's
    entries. Two names of one tensor, such as a tied head's, are written as two tensors.
    """
    entries: list[dict[str, Any]] = []
    weight_map: dict[str, str] = {}
    total = 0
    for count, group in enumerate(files(tensors, max_file_bytes), 1):
        file = f"model-{count:05}.safetensors"
        with open(directory / file, "wb", opener=_opened) as opened:
            opened.writelines(written(group))
        weight_map |= dict.fromkeys(group, file)
        total += sum(tensor.nbytes for tensor in group.values())
        entries += [entry(name, tensor, checksum=True) for name, tensor in group.items()]
    if len(set(weight_map.values())) == 1:
        (directory / file).rename(directory / SINGLE)
    else:
        with open(directory / INDEX, "w", opener=_opened) as opened:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            opened.write(json.dumps(index))
    return entries
