"""Reads a pushed directory without trust: nothing outside the root, no second read of checked
bytes.

A path is resolved first (links are followed as long as they stay inside the root). It is then
opened component by component without following any link, so a swap between check and read is
refused. A file is read from its beginning, never mapped, so the parsed and kept bytes are the
checksummed ones. `confirm` compares the times and sizes of files with those at the read. It does
not notice a write through an unsynced mapping, or times that were set back; checksums in the
manifest do.
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

MAX_SMALL_BYTES = 16 * 2**20  # an index has about 100 bytes per tensor
MAX_JSON_BYTES = 2**20  # a JSON object of unknown fields, such as a model's config


class _Stamp(NamedTuple):
    """Metadata that changes when a file is written, truncated or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Source:
    """One directory below `root`. The constructor raises `PlaceForbidden` if the path leads outside
    of it, `ContentRefused` if it is unusable.
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
                f"path {self.path} is not a directory; name one that holds model.safetensors or "
                "its index"
            )
        self._read: dict[str, _Stamp] = {}

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        """Open one file of the directory. Raise `ContentRefused` if its times or size change before
        it is closed, or have changed since an earlier open.
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
        """Return all bytes of one small file of the directory."""
        with self.opened(name) as file:
            if file.left > MAX_SMALL_BYTES:
                raise ContentRefused(
                    f"{file.path} has {file.left} bytes, the limit is {MAX_SMALL_BYTES}; only "
                    "tensors may take more"
                )
            return file.read(file.left)

    def confirm(self) -> None:
        """Check that no file has changed since it was read, so that all belong together."""
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
                f"{path} leads to {resolved}, outside the weight root {self._root}; put the "
                "weights below it"
            )
        return resolved

    def _open(self, path: Path) -> tuple[int, os.stat_result]:
        """Open a resolved path, in which no component may be a link; return fd and status."""
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
                f"{path} cannot be opened ({error.strerror}); make it readable, and keep its "
                "links unchanged during a push"
            ) from None


class OpenFile:
    """An open file with `left` unread bytes."""

    def __init__(self, file: FileIO, path: Path, size: int) -> None:
        self._file, self.path, self.left = file, path, size

    def read(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        data = bytearray(count)
        self.into(memoryview(data))
        return bytes(data)

    def into(self, buffer: memoryview) -> None:
        """Fill the buffer."""
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])
            if not count:
                raise changed(self.path)
            done += count
        self.left -= done


def changed(path: Path) -> ContentRefused:
    return ContentRefused(
        f"{path} changed while it was read; push a directory that no program writes to any more"
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
            f"{where}: cannot be read as a JSON object ({error}); write the file again"
        ) from None
