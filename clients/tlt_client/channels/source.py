"""Reads a pushed directory without trusting it: nothing outside the root, no second look at bytes
that were checked.

A path is resolved first (links are followed as long as they stay inside the root) and then opened
component by component without following any link, so a swap between check and read is refused
instead of followed. A file is read from its beginning on, never mapped: what is checksummed is what
is parsed and kept. `confirm` tells whether anything read has changed since, by the times and sizes
that the file system keeps: it does not notice who writes through a mapping that is not synced, or
sets times back. Checksums in the manifest do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tlt_client.channels.errors import ContentRefused, PlaceForbidden

MAX_SMALL_BYTES = 16 * 2**20  # an index has about 100 per tensor
MAX_JSON_BYTES = 2**20  # that may say anything, such as a model's config


class _Stamp(NamedTuple):
    """What changes when a file is written, truncated or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Source:
    """One directory below `root`. `PlaceForbidden` when it leads elsewhere, `ContentRefused` when
    it cannot be used.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._root = Path(os.path.realpath(root))
        if not path or "\0" in path:
            raise ContentRefused(
                f"path is {path[:80]!r}; name a directory below the weight root {self._root}"
            )
        self.path = self._resolve(self._root / path)
        descriptor, kind = self._open(self.path)
        os.close(descriptor)
        if not stat.S_ISDIR(kind.st_mode):
            raise ContentRefused(
                f"path {self.path} is not a directory; name one that holds model.safetensors or its index"
            )
        self._read: dict[str, _Stamp] = {}

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        """One file of the directory, whose time and size may not change until it is closed, nor
        between two times that it is opened.
        """
        path = self._resolve(self.path / name)
        descriptor, before = self._open(path)
        if not stat.S_ISREG(before.st_mode):
            os.close(descriptor)
            raise ContentRefused(
                f"{path} is not a regular file; write the tensors into plain files"
            )
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            yield OpenFile(file, path, before.st_size)
            after = os.fstat(file.fileno())
        if not _stamp(before) == _stamp(after) == self._read.setdefault(name, _stamp(before)):
            raise changed(path)

    def read(self, name: str) -> bytes:
        """All bytes of one small file of the directory."""
        with self.opened(name) as file:
            if file.left > MAX_SMALL_BYTES:
                raise ContentRefused(
                    f"{file.path} has {file.left} bytes, the limit is {MAX_SMALL_BYTES}; only tensors may take more"
                )
            return file.read(file.left)

    def confirm(self) -> None:
        """Everything read is still what stands there, so the files belong together."""
        for name, stamp in self._read.items():
            path = self._resolve(self.path / name)
            descriptor, now = self._open(path)
            os.close(descriptor)
            if _stamp(now) != stamp:
                raise changed(path)

    def _resolve(self, path: Path) -> Path:
        resolved = Path(os.path.realpath(path))
        if not resolved.is_relative_to(self._root):
            raise PlaceForbidden(
                f"{path} leads to {resolved}, outside the weight root {self._root}; put the weights below it"
            )
        return resolved

    def _open(self, path: Path) -> tuple[int, os.stat_result]:
        """A descriptor of a resolved path and what it is; no component may be a link by now."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        parts = path.relative_to(self._root).parts
        try:
            for i, part in enumerate(parts):
                flags = (
                    os.O_RDONLY
                    | os.O_NOFOLLOW
                    | os.O_NONBLOCK
                    | (os.O_DIRECTORY if i + 1 < len(parts) else 0)
                )
                above, descriptor = descriptor, os.open(part, flags, dir_fd=descriptor)
                os.close(above)
            return descriptor, os.fstat(descriptor)
        except FileNotFoundError:
            os.close(descriptor)
            raise ContentRefused(
                f"{path} does not exist; write the weights before they are pushed"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ContentRefused(
                f"{path} cannot be opened ({error.strerror}); it must be readable, and no link may change "
                "meanwhile"
            ) from None


class OpenFile:
    """A file on its way: `left` bytes of it are still to be read."""

    def __init__(self, file: FileIO, path: Path, size: int) -> None:
        self._file, self.path, self.left = file, path, size

    def read(self, count: int) -> bytes:
        """Exactly so many."""
        data = bytearray(count)
        self.into(memoryview(data))
        return bytes(data)

    def into(self, buffer: memoryview) -> None:
        """As many as it holds."""
        there = 0
        while there < len(buffer):
            came = self._file.readinto(buffer[there:])
            if not came:
                raise changed(self.path)
            there += came
        self.left -= there


def changed(path: Path) -> ContentRefused:
    return ContentRefused(
        f"{path} changed while it was read; push a directory that nobody writes to any more"
    )


def _stamp(kind: os.stat_result) -> _Stamp:
    return _Stamp(kind.st_dev, kind.st_ino, kind.st_size, kind.st_mtime_ns, kind.st_ctime_ns)


def json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_JSON_BYTES}")
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ContentRefused(
            f"{where}: not readable as a JSON object ({error}); write the file again"
        ) from None
