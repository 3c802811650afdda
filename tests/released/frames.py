"""Journals and segment files by their published layout, without the code that writes them.

A test puts other fields into them: the directories of this machine, or what a later version may
write.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

SEGMENT = b"tltseg\r\n"
SEGMENT_FRAME = struct.Struct("<IQQ")  # length, number, xxh3 of the content


def journal_records(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal: length, CRC-32 of length and payload, payload."""
    while len(data) >= 8:
        length = int.from_bytes(data[:4], "little")
        payload, data = data[8 : 8 + length], data[8 + length :]
        if len(payload) == length:
            yield msgspec.msgpack.decode(payload)


def journal_of(*records: dict[str, Any]) -> bytes:
    parts = []
    for record in records:
        payload = msgspec.msgpack.encode(record)
        length = len(payload).to_bytes(4, "little")
        parts += [length, zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little"), payload]
    return b"".join(parts)


def with_header(journal: bytes, **fields: object) -> bytes:
    """Return the journal with other fields in its first record. The rest is as it was."""
    header = next(journal_records(journal))
    return journal_of(header | fields) + journal[len(journal_of(header)) :]


def with_segment_header(path: Path, **fields: object) -> None:
    """Write other fields into the header of a segment file."""
    data = path.read_bytes()
    length, number, _ = SEGMENT_FRAME.unpack_from(data, len(SEGMENT))
    first = len(SEGMENT) + SEGMENT_FRAME.size
    content = json.dumps(json.loads(data[first : first + length]) | fields).encode()
    checksum = xxhash.xxh3_64_intdigest(content, seed=number)
    frame = SEGMENT_FRAME.pack(len(content), number, checksum) + content
    path.write_bytes(SEGMENT + frame + data[first + length :])
