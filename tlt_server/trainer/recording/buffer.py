"""The sequences to train a drafter on: in memory, and in segment files that outlive the process.

Every API key has its own segments. When tokens or bytes exceed their bound, the oldest segment of
the key with the most data is dropped; so a key may use capacity that no other needs, and a flood
from one displaces only its own data. Memory is rebuilt from the files, so a restart finds the same
buffer. If files cannot be written, the buffer continues in memory and reports it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tlt_server.process.private import private_directory
from tlt_server.samples.inbox import Inbox
from tlt_server.samples.sample import Sample
from tlt_server.samples.segments import (
    MAX_NUMBER,
    SUFFIX,
    Recorded,
    Refusals,
    SegmentHeader,
    append,
    header_bytes,
    read_segment,
    recorded,
)

PARTS = 32  # segments of a full buffer with one key
RETRY_S = 10.0  # between attempts to write, once one failed


@dataclass(frozen=True)
class BufferBounds:
    tokens: int
    bytes: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is kept."""
        return max(1, self.tokens // 4)


@dataclass
class Segment:
    """Sequences of one API key that are kept and dropped together."""

    owner: str
    path: Path | None  # None: in memory only
    entries: list[Recorded] = field(default_factory=list)
    tokens: int = 0
    bytes: int = 0

    def add(self, entry: Recorded) -> None:
        self.entries.append(entry)
        self.tokens += len(entry.sample.tokens) // 4
        self.bytes += entry.size


class SampleBuffer:
    def __init__(
        self,
        directory: Path | None,
        header: SegmentHeader,
        bounds: BufferBounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the directory's segments. `directory`: None keeps everything in memory."""
        self.header, self.bounds = header, bounds
        self.refusals = Refusals()
        self.disk_error = ""  # why sequences are in memory only; empty: they are not
        self._directory, self._clock = directory, clock
        self._retry_s = 0.0
        self._segments: list[Segment] = []  # in order of their first sequence
        self._open: dict[str, Segment] = {}  # by key: the one that is appended to
        self._next = 1
        if directory is not None:
            self._read(directory)

    def _read(self, directory: Path) -> None:
        try:
            private_directory(directory, parents=True, exist_ok=True)
            paths = sorted(directory.glob(f"*{SUFFIX}"))
        except OSError as error:
            self._failed(directory, error)
            return
        left_out: list[Path] = []
        for path in paths:
            segment = Segment("", path)
            for entry in read_segment(path, self.header, self.refusals, self.bounds.longest):
                segment.owner = entry.sample.owner
                segment.add(entry)
            if segment.entries:
                self._segments.append(segment)
                self._next = max(self._next, segment.entries[-1].number + 1)
            else:
                left_out.append(path)
            self._next = max(self._next, _first_number(path) + 1)
        self._segments.sort(key=lambda segment: segment.entries[0].number)
        self._shrink()
        self._remove(left_out)

    def __len__(self) -> int:
        return sum(len(segment.entries) for segment in self._segments)

    def __iter__(self) -> Iterator[Recorded]:
        """Yield all sequences in the order of their arrival."""
        entries = [entry for segment in self._segments for entry in segment.entries]
        return iter(sorted(entries, key=lambda entry: entry.number))

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self._segments)

    @property
    def size(self) -> int:
        """Return the bytes of all sequences in files, written or not."""
        return sum(segment.bytes for segment in self._segments)

    def tokens_by_version(self) -> dict[str, int]:
        """Return the output tokens that each weight version of the target computed."""
        found: Counter[str] = Counter()
        for entry in self:
            sample = entry.sample
            ends = [*(first for first, _ in sample.spans[1:]), sample.output_len]
            for (first, version), end in zip(sample.spans, ends, strict=True):
                found[version] += end - first
        return dict(found)

    def add(self, sample: Sample) -> bool:
        """Keep a sequence. Return False, and record the reason, if it does not fit the target or
        the bounds.
        """
        try:
            if len(sample.tokens) > 4 * self.bounds.longest:
                raise ValueError(
                    f"{len(sample.tokens) // 4} tokens, the limit is {self.bounds.longest}"
                )
            sample.check(self.header.vocab_size)
        except (ValueError, OverflowError) as error:
            self.refusals.add(f"sequence {self._next}: {error}; it is left out")
            return False
        entry, data = recorded(self._next, sample)
        if entry.size > self.bounds.bytes:
            self.refusals.add(
                f"sequence {self._next}: {entry.size} bytes, at most {self.bounds.bytes}; it is "
                "left out"
            )
            return False
        self._next += 1
        segment = self._segment(sample.owner, entry)
        if segment.path is not None and not self._write(segment.path, data):
            del self._open[sample.owner]  # the next one goes elsewhere
        segment.add(entry)
        self._shrink()
        return True

    def take_in(self, inbox: Inbox) -> None:
        """Read one waiting file of another server, without sequences that are here already: those
        with the same tokens, seed and weight versions.
        """
        entries = [*inbox.take(self.header, self.refusals, self.bounds.longest)]
        known = {_fact(entry.sample) for entry in self} if entries else set()
        for entry in entries:
            if (fact := _fact(entry.sample)) not in known:
                known.add(fact)
                self.add(entry.sample)

    def _segment(self, owner: str, entry: Recorded) -> Segment:
        """Return the key's segment to append to; a new one if the last is full or failed."""
        segment = self._open.get(owner)
        if segment is not None and self._takes(segment, entry):
            return segment
        segment = Segment(owner, None)
        if self._directory is not None and self._clock() >= self._retry_s:
            path = self._directory / f"{entry.number:016x}{SUFFIX}"
            if self._write(path, header_bytes(self.header)):
                segment.path = path
        self._open[owner] = segment
        self._segments.append(segment)
        return segment

    def _takes(self, segment: Segment, entry: Recorded) -> bool:
        if segment.path is None and self._directory is not None and self._clock() >= self._retry_s:
            return False  # the disk may take files again
        tokens = segment.tokens + len(entry.sample.tokens) // 4
        full = tokens > self.bounds.tokens // PARTS
        return not (full or segment.bytes + entry.size > self.bounds.bytes // PARTS)

    def _write(self, path: Path, data: bytes) -> bool:
        """Append to a file. Return False if that failed; the next process finds the earlier
        content.
        """
        try:
            append(path, data)
            self.disk_error = ""
        except OSError as error:
            self._failed(path, error)
        return not self.disk_error

    def _failed(self, path: Path, error: OSError) -> None:
        self.disk_error = f"cannot write {path} ({error.strerror}); sequences are kept in memory"
        self._retry_s = self._clock() + RETRY_S

    def _shrink(self) -> None:
        """Drop segments until the bounds hold."""
        while self.tokens > self.bounds.tokens or self.size > self.bounds.bytes:
            held: Counter[str] = Counter()
            for segment in self._segments:
                held[segment.owner] += segment.tokens
            most = max(held.values())
            gone = next(s for s in self._segments if held[s.owner] == most)
            self._segments.remove(gone)
            if self._open.get(gone.owner) is gone:
                del self._open[gone.owner]
            if gone.path is not None:
                self._unlink(gone.path)

    def _remove(self, left_out: list[Path]) -> None:
        """Remove the oldest unused files while all files exceed the bound."""
        sizes = [path.stat().st_size for path in left_out]
        for path, size in zip(left_out, list(sizes), strict=True):
            if self.size + sum(sizes) > self.bounds.bytes:
                self._unlink(path)
                sizes.remove(size)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._failed(path, error)

    def check(self) -> None:
        """Assert every invariant; the property tests call this after each operation."""
        assert self.tokens <= self.bounds.tokens and self.size <= self.bounds.bytes
        numbers = [entry.number for entry in self]
        assert len(set(numbers)) == len(numbers) and max(numbers, default=0) < self._next
        for segment in self._segments:
            assert segment.entries, "a segment without sequences"
            assert {entry.sample.owner for entry in segment.entries} == {segment.owner}
            assert segment.bytes == sum(entry.size for entry in segment.entries)
        assert all(segment in self._segments for segment in self._open.values())


def _first_number(path: Path) -> int:
    """Return the number in a segment's name; 0 for another file's name."""
    try:
        number = int(path.name.removesuffix(SUFFIX), 16)
    except ValueError:
        return 0
    return number if number <= MAX_NUMBER else 0


def _fact(sample: Sample) -> tuple[bytes, int, int, tuple[tuple[int, str], ...]]:
    return sample.tokens, sample.prompt_len, sample.seed, tuple(sample.spans)
