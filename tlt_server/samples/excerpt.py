"""Excerpts of segment files, in order of arrival, read while another process appends to them.

The server uses them to return recorded sequences. The writer is never waited for: only complete
frames with the right checksum are read.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tlt_server.samples.identity import identity_of, vocabulary_of
from tlt_server.samples.inbox import DIRECTORY, Inbox
from tlt_server.samples.segments import (
    FRAME,
    MAX_FRAME,
    SUFFIX,
    SegmentHeader,
    checksum_of,
    header_bytes,
    without_link,
)

MAX_BYTES = 2**23  # largest excerpt, unless a single sequence is larger


class Excerpt(NamedTuple):
    data: bytes  # a segment file
    after: int  # number of the last sequence looked at; the next excerpt begins after it
    newest: int  # number of the newest sequence; 0: there is none
    left: int  # sequences after this excerpt


class _Place(NamedTuple):
    number: int
    path: Path
    start: int
    length: int  # bytes, without the frame's head


class SampleFiles:
    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self._model = directory, model
        self.inbox = Inbox(directory / DIRECTORY)  # sequences that other servers recorded
        self._header = b""

    def header(self) -> SegmentHeader:
        """Return the header of this target's files. `ModelError`: see `read`."""
        return SegmentHeader.of(identity_of(self._model), vocabulary_of(self._model))

    def read(self, after: int, limit: int) -> Excerpt:
        """Return the sequences with numbers above `after`: at most `limit`, and MAX_BYTES together
        unless a single one is larger. `ModelError` if the model's files cannot be read.
        """
        if not self._header:
            self._header = header_bytes(self.header())
        newest = max((place.number for place in self._places()), default=0)
        # Sequences that have come since then wait for the next excerpt: one of them may be in a
        # file that this second look has passed already, while a later one is found.
        left = 0
        found: list[tuple[int, _Place]] = []  # the first ones, as a heap with the last on top
        for place in self._places():
            if after < place.number <= newest:
                left += 1
                push = heapq.heappush if len(found) < limit else heapq.heappushpop
                push(found, (-place.number, place))
        parts, size = [self._header], 0
        for _, place in sorted(found, reverse=True):
            if size and size + place.length > MAX_BYTES:
                break
            frame = _frame(place)
            parts.append(frame)
            size += len(frame)
            after, left = place.number, left - 1
        return Excerpt(b"".join(parts), after, newest, left)

    def _places(self) -> Iterator[_Place]:
        """Yield the position of every complete frame, file by file."""
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            with _opened(path) as (descriptor, end):
                at = len(self._header)
                if os.pread(descriptor, at, 0) != self._header:
                    continue  # the file belongs to another target
                while at + FRAME.size <= end:
                    head = os.pread(descriptor, FRAME.size, at)
                    if len(head) != FRAME.size:
                        break  # the file was cut since its size was read
                    length, number, _ = FRAME.unpack(head)
                    at += FRAME.size
                    if length > MAX_FRAME or at + length > end:
                        break
                    yield _Place(number, path, at, length)
                    at += length


def _frame(place: _Place) -> bytes:
    """Return head and content; nothing if they are incomplete, or the file has gone."""
    with _opened(place.path) as (descriptor, _):
        data = os.pread(descriptor, FRAME.size + place.length, place.start - FRAME.size)
    if len(data) != FRAME.size + place.length:
        return b""
    content = data[FRAME.size :]
    whole = FRAME.unpack_from(data) == (
        place.length,
        place.number,
        checksum_of(place.number, content),
    )
    return data if whole else b""


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Return the file's descriptor and size. An unreadable file, or one that is not regular, counts
    as empty.
    """
    try:
        descriptor = without_link(str(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        descriptor = _empty()
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            descriptor = _empty()
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def _empty() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
