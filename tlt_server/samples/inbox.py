"""Sequences recorded by other servers, waiting for this server's trainer process.

The server writes each received segment file into a directory, atomically; the trainer process reads
and removes it. Both check every sequence as they check their own files.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tlt_server.errors import Unavailable
from tlt_server.process.private import private_directory
from tlt_server.samples.segments import (
    SUFFIX,
    Recorded,
    Refusals,
    SegmentHeader,
    append,
    read_segment,
)

DIRECTORY = "incoming"  # below that of the segment files
PARTIAL = ".partial"
MAX_FILES = 8  # waiting files, at most
MESSAGES = 8


class Put(NamedTuple):
    sequences: int  # kept for the trainer process
    refused: int
    refusals: list[str]  # the first reasons


class Inbox:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._putting = threading.Lock()

    def clear(self) -> None:
        """Remove files that a crash of the server left half-written."""
        with suppress(OSError):
            for partial in self.directory.glob(f"*{PARTIAL}"):
                partial.unlink(missing_ok=True)

    def check_room(self) -> None:
        """Raise `Unavailable` while the maximum number of files is waiting."""
        if len(self._waiting()) >= MAX_FILES:
            raise Unavailable(
                "earlier sequences still wait for the trainer process; send again soon"
            )

    def put(self, content: bytes, header: SegmentHeader) -> Put:
        """Write the content of a segment file if any sequence of it fits the header. `OSError` if
        it cannot be written; `Unavailable`: see `check_room`. Several are written one by one.
        """
        with self._putting:
            self.check_room()
            return self._put(content, header)

    def _put(self, content: bytes, header: SegmentHeader) -> Put:
        private_directory(self.directory, parents=True, exist_ok=True)
        path = self.directory / f"{secrets.token_hex(8)}{SUFFIX}"
        partial = path.with_suffix(PARTIAL)
        try:
            append(partial, content)
            refusals = Refusals(MESSAGES)
            fitting = sum(1 for _ in read_segment(partial, header, refusals))
            if fitting:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        said = [message.replace(str(partial), "the file") for message in refusals.take()]
        return Put(fitting, refusals.count, said)

    def take(self, header: SegmentHeader, refusals: Refusals, longest: int) -> Iterator[Recorded]:
        """Yield the sequences of one waiting file, then remove it."""
        for path in self._waiting()[:1]:
            yield from read_segment(path, header, refusals, longest)
            with suppress(OSError):
                path.unlink()

    def _waiting(self) -> list[Path]:
        """Return the waiting files, oldest first."""
        try:
            found = [e for e in os.scandir(self.directory) if e.name.endswith(SUFFIX)]
            found.sort(
                key=lambda entry: (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
            )
        except OSError:
            return []
        return [Path(entry.path) for entry in found]
