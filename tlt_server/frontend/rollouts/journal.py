"""The journal of a rollout: one append-only file with its request, every output, and its end.

A record is 4 bytes of length, 4 of checksum (CRC-32 of length and payload), then msgpack. Reading
stops at the first record that is incomplete or out of order; writing continues there. There is one
write per append and no fsync: a record survives the process that wrote it, but not a power failure.
The file has mode 0600, since it contains prompts. Called by `rollouts`.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tlt_server.errors import StorageFailed
from tlt_server.frontend.generation.requests import RequestItem
from tlt_server.process.private import private_file
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import GenerateRequest, StepOutput

# Times that the next process can read, on two clocks. The wall clock may jump, between processes
# too; the time since boot does not. So a duration is that of the boot's clock where both times are
# of one boot, and the wall clock's after another boot.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class KeptTime(NamedTuple):
    wall_s: float
    boot: str  # id of the boot; empty where it is not known
    boot_s: float  # since that boot


def now() -> KeptTime:
    return KeptTime(time.time(), _boot(), time.clock_gettime(time.CLOCK_BOOTTIME))


def elapsed_s(then: KeptTime) -> float:
    """Return the seconds since then, never less than 0."""
    at = now()
    same = then.boot and then.boot == at.boot
    return max(0.0, at.boot_s - then.boot_s if same else at.wall_s - then.wall_s)


@cache
def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


FRAME = 8


class KeptItem(Struct, frozen=True):
    """An item whose choices share one prompt, which is written once."""

    id: str
    token_ids: list[int] | PackedIds
    requests: list[GenerateRequest]

    @classmethod
    def of(cls, item: RequestItem) -> KeptItem:
        bare = [
            msgspec.structs.replace(request, token_ids=[], deadline_s=None, begin_by_s=None)
            for request in item.requests
        ]
        return cls(item.id, item.requests[0].token_ids, bare)

    def item(self, deadline_s: float) -> RequestItem:
        whole = [
            msgspec.structs.replace(request, token_ids=self.token_ids, deadline_s=deadline_s)
            for request in self.requests
        ]
        return RequestItem(self.id, whole)


class Header(Struct, frozen=True, kw_only=True, tag="rollout"):
    """The request. `created_s` and `deadline_s`: wall clock. `boot` and `boot_s`: its creation by
    the clock of that boot.
    """

    id: str
    model: str
    detached: bool
    owner: str = ""  # name of the API key that asked; empty on a server without keys
    key: str  # idempotency key of the client; empty without one
    digest: str  # digest of the body that came with the key
    created_s: float
    deadline_s: float
    boot: str = ""
    boot_s: float = 0.0
    fingerprint: Fingerprint | None = None  # the engine's
    format: int = 1  # absent from the first journals
    items: list[KeptItem]

    @property
    def created(self) -> KeptTime:
        return KeptTime(self.created_s, self.boot, self.boot_s)


class Grown(Struct, frozen=True, tag="grown"):
    outputs: list[StepOutput]


class RolloutEnd(Struct, frozen=True, tag="end"):
    at_s: float
    tokens: int
    boot: str = ""
    boot_s: float = 0.0

    @property
    def at(self) -> KeptTime:
        return KeptTime(self.at_s, self.boot, self.boot_s)


Record = Header | Grown | RolloutEnd
# A field that a reader does not know is read over, so each further field makes a later format. It
# has a default that means what servers did before it. Formats before are read.
FORMAT = 7
_DECODER = msgspec.msgpack.Decoder(Record)
# How every end begins after the count of its fields, and no other record.
_END = msgspec.msgpack.encode(RolloutEnd(0.0, 0))[1:10]


class Past(NamedTuple):
    """The content of a journal. `length`: bytes of complete records."""

    header: Header
    outputs: list[StepOutput]
    end: RolloutEnd | None
    length: int


def frame(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload


def past(data: bytes, *, outputs: bool = True) -> Past | None:
    """Return the longest prefix of complete records in order (header, outputs, end); None if the
    header is incomplete. Without `outputs` only the checksums of records between header and end are
    checked, which takes an eighth of the time.
    """
    header: Header | None = None
    end: RolloutEnd | None = None
    found: list[StepOutput] = []
    length = 0
    for payload, after in _frames(data):
        if end is not None:
            break
        if outputs or header is None or payload[1:10] == _END:
            try:
                record = _DECODER.decode(payload)
            except msgspec.MsgspecError:  # whole, but written by another version
                break
            if isinstance(record, Header) != (header is None):
                break
            match record:
                case Header():
                    header = record
                case Grown() if outputs:
                    found += record.outputs
                case RolloutEnd():
                    end = record
        length = after
    return Past(header, found, end, length) if header is not None else None


def _frames(data: bytes) -> Iterator[tuple[memoryview, int]]:
    """Yield each complete payload, and its end."""
    view, at = memoryview(data), 0
    while at + FRAME <= len(data):
        head, checksum = view[at : at + 4], view[at + 4 : at + FRAME]
        length = int.from_bytes(head, "little")
        payload = view[at + FRAME : at + FRAME + length]
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(head)) != int.from_bytes(
            checksum, "little"
        ):
            return
        at += FRAME + len(payload)
        yield payload, at


class Journal:
    """The file while it is being written. Every method raises `StorageFailed` if the disk fails."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """`length`: bytes of complete records in the file; the rest is cut off."""
        self.path, self.bytes = path, length
        with _storage(path):
            self._file = private_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.ftruncate(self._file, length)
            except OSError:
                os.close(self._file)
                raise

    def append(self, framed: bytes | memoryview) -> None:
        with _storage(self.path):
            left = memoryview(framed)
            while left:
                left = left[os.write(self._file, left) :]
        self.bytes += len(framed)

    def close(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"the journal of the rollout cannot be written ({error.strerror}); free space in the "
            "file system of state_dir or delete rollouts, then send the request again",
            retry_after_s=5,
        ) from None


def outlines(directory: Path) -> list[tuple[Path, Past | None]]:
    """Return every journal without its outputs."""
    files = sorted(directory.glob("*.journal"))
    return [(path, past(path.read_bytes(), outputs=False)) for path in files]
