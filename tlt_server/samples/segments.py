"""Segment files: recorded sequences on disk, appended and never changed.

A file begins with MAGIC and one frame, its header as JSON; each further frame is one sequence. A
frame: uint32 length, uint64 number, uint64 xxh3 of the content (seeded with the number), content.
All is little-endian. A truncated file is used up to its last complete frame. Only the process that
created a file appends to it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from tlt_server.process.private import private_file
from tlt_server.samples.identity import Identity
from tlt_server.samples.sample import MAX_TOKENS, Sample, decode_sample, encode_sample

MAGIC, FORMAT = b"tltseg\r\n", 1
SUFFIX = ".segment"
MAX_FRAME = 2**28  # bytes
MAX_NUMBER = 2**62
MAX_MESSAGE = 1000  # characters; values in it come from files
FRAME = struct.Struct("<IQQ")


class SegmentHeader(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    vocab_size: int
    model: str
    template: str

    @classmethod
    def of(cls, identity: Identity, vocab_size: int) -> SegmentHeader:
        return cls(FORMAT, vocab_size, identity.model, identity.template)


class _Format(Struct):
    """The field that the headers of all versions have."""

    format: int


class Recorded(NamedTuple):
    """A sequence, its number in the order of arrival and its bytes in a file."""

    number: int
    sample: Sample
    size: int


def header_bytes(header: SegmentHeader) -> bytes:
    return MAGIC + frame(0, msgspec.json.encode(header))


def recorded(number: int, sample: Sample) -> tuple[Recorded, bytes]:
    """Return a sequence with the bytes of its frame."""
    data = frame(number, encode_sample(sample))
    return Recorded(number, sample, len(data)), data


def frame(number: int, content: bytes) -> bytes:
    return FRAME.pack(len(content), number, checksum_of(number, content)) + content


def append(path: Path, data: bytes) -> None:
    """Append to a file, creating it with private permissions. `OSError` keeps the earlier content,
    perhaps followed by a part of `data`.
    """
    descriptor = private_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


class Refusals:
    """Rejected sequences and files: their number, and messages about the first ones since the last
    call.
    """

    def __init__(self, most: int = 64) -> None:
        self.count, self.messages, self._most = 0, list[str](), most

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.messages) < self._most:
            self.messages.append(message[:MAX_MESSAGE])

    def take(self) -> list[str]:
        """Return the messages since the last call."""
        taken, self.messages = self.messages, []
        return taken


def read_segment(
    path: Path, header: SegmentHeader, refusals: Refusals, longest: int = MAX_TOKENS
) -> Iterator[Recorded]:
    """Yield the sequences of a file that fit this header and have at most `longest` tokens. Others
    are recorded in `refusals`, with file, frame and both values.
    """
    try:
        with open(path, "rb", opener=without_link) as file:
            if file.read(len(MAGIC)) != MAGIC:
                refusals.add(f"{path} is no segment file; it is left out")
                return
            first = _read_frame(file, path, 0, refusals)
            if first is None or not _fits(first[1], header, path, refusals):
                return
            number = 0
            while (found := _read_frame(file, path, number + 1, refusals)) is not None:
                number += 1
                try:
                    sample = decode_sample(found[1])
                    if found[0] > MAX_NUMBER:
                        raise ValueError(f"its number is {found[0]}, at most {MAX_NUMBER}")
                    if len(sample.tokens) > 4 * longest:
                        raise ValueError(
                            f"{len(sample.tokens) // 4} tokens, the limit is {longest}"
                        )
                    sample.check(header.vocab_size)
                except (ValueError, OverflowError) as error:
                    refusals.add(f"{path}, frame {number}: {error}; it is left out")
                    continue
                yield Recorded(found[0], sample, FRAME.size + len(found[1]))
    except OSError as error:
        refusals.add(f"{path} cannot be read ({error.strerror}); it is left out")


def _read_frame(
    file: BinaryIO, path: Path, number: int, refusals: Refusals
) -> tuple[int, bytes] | None:
    """Return number and content of the next frame; None at the end, or if it is incomplete."""
    head = file.read(FRAME.size)
    if not head:
        return None
    problem = "it ends there"
    if len(head) == FRAME.size:
        length, serial, checksum = FRAME.unpack(head)
        problem = f"its length is {length}, at most {MAX_FRAME}"
        if length <= MAX_FRAME:
            content = file.read(length)
            found = checksum_of(serial, content)
            if len(content) == length and found == checksum:
                return serial, content
            problem = f"its checksum is {found:016x}, not {checksum:016x}"
            if len(content) < length:
                problem = f"it has {len(content)} bytes of {length}"
    refusals.add(f"{path}, frame {number}: {problem}; what comes before is used")
    return None


def _fits(content: bytes, header: SegmentHeader, path: Path, refusals: Refusals) -> bool:
    """Return True if a file's header equals this one; else record each differing field with both
    values.
    """
    try:
        version = msgspec.json.decode(content, type=_Format).format
        if version != FORMAT:
            refusals.add(
                f"{path} has segment format {version}, this version reads {FORMAT}; it is left "
                "out: read it with the version that wrote it"
            )
            return False
        found = msgspec.json.decode(content, type=SegmentHeader)
    except (ValueError, RecursionError) as error:  # nested too deeply
        refusals.add(f"{path} has a header that is not read ({error}); it is left out")
        return False
    differ = [
        f"{name} {getattr(found, name)!r}, here {getattr(header, name)!r}"
        for name in header.__struct_fields__
        if getattr(found, name) != getattr(header, name)
    ]
    if differ:
        refusals.add(f"{path} is of another target: {'; '.join(differ)}; it is left out")
    return not differ


def checksum_of(number: int, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content, seed=number)


def without_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
