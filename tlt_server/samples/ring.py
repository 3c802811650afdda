"""A bounded ring of entries in shared memory, from one producer process to one consumer process.

Neither waits and nothing is locked: only the producer moves `head`, only the consumer `tail`, both
byte counts that never wrap. An entry without room is dropped and counted. Each entry has its
length, its number and a checksum of number and content, so a consumer never reads incomplete bytes.
Either process may end at any moment and another one take its place.

Layout: WORDS little-endian uint64 (magic, capacity, head, tail, entries offered, entries dropped),
then `capacity` bytes. An entry: uint64 length, uint64 number, uint64 checksum, content, padding to
8 bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from tlt_server.errors import StartupError
from tlt_server.process.private import private_file

Buffer = bytes | memoryview  # contiguous
WORK = "trainer"  # directory next to the ring, in which the trainer leaves drafters
MAGIC = int.from_bytes(b"tltring1", "little")
WORDS, HEAD_BYTES = 6, 64
ENTRY = 24  # bytes before an entry's content
_CAPACITY, _HEAD, _TAIL, _OFFERED, _DROPPED = range(1, WORDS)
PATIENCE = 3  # looks at an entry that is not whole before it counts as lost


def make_ring(path: Path, capacity: int) -> None:
    """Create an empty ring of `capacity` bytes, a multiple of 8. `StartupError` if there is too
    little space.
    """
    assert capacity > 0 and capacity % 8 == 0
    descriptor = private_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, HEAD_BYTES + capacity)
    except OSError as error:
        os.close(descriptor)
        raise StartupError(
            f"{path.parent} has no room for a ring of {capacity // 2**20} MiB ({error.strerror}); "
            "lower drafter_ring_mb, or name another directory in TMPDIR"
        ) from None
    try:
        words = np.zeros(WORDS, "<u8")
        words[:2] = MAGIC, capacity
        os.pwrite(descriptor, words.tobytes(), 0)
    finally:
        os.close(descriptor)


class _Mapped:
    """The ring's memory. `StartupError` if the file is not a ring."""

    def __init__(self, path: Path) -> None:
        try:
            descriptor = private_file(path, os.O_RDWR)
        except OSError as error:
            raise StartupError(f"cannot open the ring {path}: {error.strerror}") from None
        try:
            size = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, size) if size > HEAD_BYTES else None
        finally:
            os.close(descriptor)
        if self._memory is None:
            raise StartupError(f"{path} has {size} bytes, a ring more than {HEAD_BYTES}")
        self._word_W = np.frombuffer(self._memory, "<u8", WORDS)
        self.capacity = int(self._word_W[_CAPACITY])
        if int(self._word_W[0]) != MAGIC or self.capacity != size - HEAD_BYTES:
            raise StartupError(f"{path} is not a ring of {size - HEAD_BYTES} bytes")
        self._bytes = memoryview(self._memory)[HEAD_BYTES:]

    def close(self) -> None:
        memory = self._memory
        del self._word_W
        self._bytes.release()
        assert memory is not None
        memory.close()

    @property
    def offered(self) -> int:
        """Entries offered by the producer, dropped ones included."""
        return int(self._word_W[_OFFERED])

    @property
    def dropped(self) -> int:
        return int(self._word_W[_DROPPED])

    @property
    def used(self) -> int:
        """Bytes of the unread entries, including their headers."""
        return int(self._word_W[_HEAD]) - int(self._word_W[_TAIL])

    @property
    def room(self) -> int:
        """The largest content of the next entry, in bytes."""
        return max(0, (self.capacity - self.used - ENTRY) // 8 * 8)

    def _parts(self, at: int, size: int) -> Iterator[memoryview]:
        """Yield the one or two memory ranges of `size` bytes from the byte count `at` on."""
        first = at % self.capacity
        fits = min(size, self.capacity - first)
        yield self._bytes[first : first + fits]
        if size > fits:
            yield self._bytes[: size - fits]


class RingProducer(_Mapped):
    def offer(self, *parts: Buffer) -> bool:
        """Add an entry, whose content is the concatenated parts. Return False if it was dropped
        because the ring is full.
        """
        number = self.offered
        head = int(self._word_W[_HEAD])
        views = [memoryview(part).cast("B") for part in parts]
        size = ENTRY + _padded(sum(map(len, views)))
        room = self.capacity - self.used
        if size <= room:
            self._write(head, _before(views, number))
            at = head + ENTRY
            for view in views:
                self._write(at, view)
                at += len(view)
            self._word_W[_HEAD] = head + size  # from here on the consumer sees the entry
        else:
            self._word_W[_DROPPED] += np.uint64(1)
        self._word_W[_OFFERED] = number + 1
        return size <= room

    def _write(self, at: int, data: Buffer) -> None:
        data = memoryview(data)
        done = 0
        for place in self._parts(at, len(data)):
            place[:] = data[done : done + len(place)]
            done += len(place)


class RingConsumer(_Mapped):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lost = 0  # times that the ring was emptied, because an entry was not whole
        self._looks = 0

    def take(self) -> bytes | None:
        """Remove and return the oldest entry; None if there is none."""
        head, tail = int(self._word_W[_HEAD]), int(self._word_W[_TAIL])
        if head == tail:
            return None
        content = self._whole(tail, head - tail)
        if content is not None:
            self._looks = 0
            self._word_W[_TAIL] = tail + ENTRY + _padded(len(content))
        else:
            self._looks += 1
            if self._looks >= PATIENCE:  # its bytes will not come any more
                self._looks, self.lost = 0, self.lost + 1
                self._word_W[_TAIL] = head
        return content

    def _whole(self, tail: int, used: int) -> bytes | None:
        if not ENTRY <= used <= self.capacity:
            return None
        length, number, checksum = np.frombuffer(self._read(tail, ENTRY), "<u8").tolist()
        if ENTRY + _padded(length) > used:
            return None
        content = self._read(tail + ENTRY, length)
        return content if checksum == _checksum([content], number) else None

    def _read(self, at: int, size: int) -> bytes:
        return b"".join(self._parts(at, size))


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def _before(parts: Sequence[memoryview], number: int) -> bytes:
    length = sum(map(len, parts))
    return np.array([length, number, _checksum(parts, number)], "<u8").tobytes()


def _checksum(parts: Sequence[Buffer], number: int) -> int:
    checksum = xxhash.xxh3_64(seed=number)
    for part in parts:
        checksum.update(part)
    return checksum.intdigest()
