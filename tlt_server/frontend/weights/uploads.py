"""Uploads: versions that arrive by http, as parts below the state directory. Their number, size and
age are bounded, and a push or an abort ends them.

A part grows only from its start. Repeated bytes must be the same bytes, so a client that lost its
connection may send from any earlier position; a range that would leave a gap is refused with the
position to continue from. Uploads are lost at a restart of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from tlt_client.channels.checkpoint import CALIBRATION
from tlt_server.errors import Conflict, InvalidRequest, NotFound, StorageFailed
from tlt_server.process.private import private_directory, private_file
from tlt_server.process.threads import Errands
from tlt_server.process.turns import over_share

if TYPE_CHECKING:
    from tlt_server.config import Config

PART = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}\.safetensors|{re.escape(CALIBRATION)}", re.ASCII
)
PIECE_BYTES = 2**20  # size of one write


class PartStatus(Struct, frozen=True):
    """The received bytes of a part."""

    part: Annotated[str, "its name"]
    bytes: Annotated[int, "received, from its start; the next range starts here"]
    total: Annotated[int, "bytes of the whole part"]
    begins: Annotated[
        bool, "the version's upload started with this call, so its sender may take it back"
    ] = False


class UploadStatus(Struct, frozen=True):
    """A version that is being uploaded by http."""

    version: Annotated[str, "the version of the parts"]
    parts: Annotated[int, "parts that were started"]
    bytes: Annotated[int, "bytes received"]
    total: Annotated[int, "bytes of all started parts when complete"]
    age_s: Annotated[float, "since its first byte"]
    idle_s: Annotated[float, "since its last byte; it is kept for upload_ttl_s"]


@dataclass
class _Part:
    total: int
    bytes: int = 0


@dataclass
class _Upload:
    owner: str  # name of the key that began it
    directory: Path
    parts: dict[str, _Part] = field(default_factory=dict)
    started_s: float = 0.0  # by the loop's clock
    touched_s: float = 0.0
    pushes: int = 0  # number of pushes that read it now
    writing: int = 0  # number of calls that bring parts of it
    dropped: bool = False  # it was dropped while a push read it, and ends with that push
    ended: bool = False  # it has ended, and its directory is being removed

    @property
    def total(self) -> int:
        """The total bytes of all started parts when complete."""
        return sum(part.total for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes received."""
        return sum(part.bytes for part in self.parts.values())


class Sealed(NamedTuple):
    """The directory that a push reads."""

    path: str  # relative to the directory of all uploads
    upload: _Upload | None  # None: there was none


def uploads_of(config: Config) -> Uploads | None:
    """Return the uploads of a server that takes weights by http, or None."""
    return Uploads(config) if "http" in config.channels else None


class Uploads:
    """All uploads of a server. Called in the frontend's loop; threads write the files, one at a
    time.
    """

    def __init__(self, config: Config) -> None:
        assert config.state_dir is not None
        self._directory, self._config = config.state_dir / "uploads", config
        shutil.rmtree(self._directory, ignore_errors=True)
        private_directory(self._directory, parents=True)
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()  # a version that comes again has another directory
        self._removing = Errands("remove uploads")
        self._leaving: dict[Path, int] = {}  # bytes of ended uploads that are not removed yet

    def listed(self) -> list[UploadStatus]:
        """Return the status of all uploads, oldest first."""
        now_s = asyncio.get_running_loop().time()
        return [
            UploadStatus(
                version,
                len(upload.parts),
                upload.bytes,
                upload.total,
                round(now_s - upload.started_s, 3),
                round(now_s - upload.touched_s, 3),
            )
            for version, upload in self._uploads.items()
        ]

    def status(self, version: str, part: str) -> PartStatus:
        upload = self._uploads.get(version)
        if upload is None or part not in upload.parts:
            raise NotFound(
                f"there is no part {part[:80]!r} of version {version[:80]!r}; send it from its "
                "first byte"
            )
        return PartStatus(part, upload.parts[part].bytes, upload.parts[part].total)

    async def write(
        self,
        version: str,
        part: str,
        start: int,
        total: int,
        body: AsyncIterator[bytes],
        owner: str = "",
    ) -> PartStatus:
        """Write a range of a part. If `body` breaks off, the received bytes are kept, except the
        last piece of a call that is cancelled while it writes. An upload without any byte is
        removed.
        """
        begins = version not in self._uploads
        upload = self._opened(version, part, total, owner)
        upload.writing += 1
        try:
            await self._take(upload, part, start, body)
        except BaseException:
            if upload.writing == 1 and not (upload.bytes or upload.pushes or upload.ended):
                self._remove(version)
            raise
        finally:
            upload.writing -= 1
        return replace(self.status(version, part), begins=begins)

    async def _take(
        self, upload: _Upload, part: str, start: int, body: AsyncIterator[bytes]
    ) -> None:
        """Write each piece while the next one arrives."""
        at, piece = start, bytearray()
        writing: asyncio.Task[None] | None = None
        try:
            async for chunk in body:
                piece += chunk
                if len(piece) >= PIECE_BYTES:
                    if writing is not None:
                        await writing
                    writing = asyncio.create_task(self._write(upload, part, at, piece))
                    at, piece = at + len(piece), bytearray()
        finally:
            if writing is not None:
                await writing
            await self._write(upload, part, at, piece)

    def _opened(self, version: str, part: str, total: int, owner: str) -> _Upload:
        """Return the upload, with an entry for this part, if there is room or others can make
        room.
        """
        config = self._config
        if not PART.fullmatch(part):
            raise InvalidRequest(
                f"part is {part[:80]!r}; name it with letters, digits, '.', '_' and '-', ending in "
                f".safetensors, or {CALIBRATION}"
            )
        upload = self._uploads.get(version)
        if upload is None and not self._room(owner, 1, config.max_uploads, lambda _: 1):
            raise StorageFailed(
                f"{len(self._uploads)} versions are being uploaded, the limit is "
                f"{config.max_uploads} (max_uploads); push or abort one of "
                f"{sorted(self._uploads)} (GET /weights says how old each is)"
            )
        there = upload.parts.get(part) if upload is not None else None
        if there is not None and there.total != total:
            raise Conflict(
                f"part {part!r} was started with {there.total} bytes in all and now has {total}; "
                "abort the version to start again"
            )
        if there is None:
            limit, leaving = config.max_upload_mb * 2**20, sum(self._leaving.copy().values())
            if not self._room(owner, total, limit - leaving, lambda upload: upload.total):
                held = sum(upload.total for upload in self._uploads.values()) + leaving
                raise StorageFailed(
                    f"part {part!r} has {total} bytes and {held} are being uploaded; the limit is "
                    f"{config.max_upload_mb} MiB (max_upload_mb): push or abort other uploads"
                )
            if upload is not None and len(upload.parts) >= config.max_upload_parts:
                raise StorageFailed(
                    f"version {version!r} has {len(upload.parts)} parts, the limit is "
                    f"{config.max_upload_parts} (max_upload_parts); send larger ones"
                )
        if upload is None:
            upload = _Upload(
                owner,
                self._directory / f"{_named(version)}-{next(self._numbers)}",
                started_s=asyncio.get_running_loop().time(),
            )
            try:
                private_directory(upload.directory)
            except OSError as error:
                raise _not_kept(part, error) from None
            self._uploads[version] = upload
            self._expire_later(version, upload)
        upload.parts.setdefault(part, _Part(total))
        upload.touched_s = asyncio.get_running_loop().time()
        return upload

    def _room(self, owner: str, asked: int, limit: int, size: Callable[[_Upload], int]) -> bool:
        """Return True if a key may have this much more. If it stays within its share, idle uploads
        of the key furthest above its own make room, oldest first.
        """
        while sum(map(size, self._uploads.values())) + asked > limit:
            held = Counter[str]()
            for upload in self._uploads.values():
                held[upload.owner] += size(upload)
            greedy = over_share(held, owner, asked, limit)
            idle = (
                version
                for version, upload in self._uploads.items()
                if upload.owner == greedy and not (upload.writing or upload.pushes)
            )
            if greedy is None or (version := next(idle, None)) is None:
                return False
            self._remove(version)
        return True

    async def _write(self, upload: _Upload, name: str, start: int, data: bytearray) -> None:
        try:
            await asyncio.to_thread(self._put, upload, name, start, data)
        except OSError as error:
            raise _not_kept(name, error) from None
        upload.touched_s = asyncio.get_running_loop().time()

    def _put(self, upload: _Upload, name: str, start: int, data: bytearray) -> None:
        part = upload.parts[name]
        with self._lock:
            if upload.ended:
                raise Conflict(
                    f"the upload of part {name!r} was ended meanwhile; send it from its first byte"
                )
            if upload.pushes:
                raise Conflict(
                    f"part {name!r} belongs to a version that is being pushed; wait for the push "
                    "to end"
                )
            if start > part.bytes:
                raise Conflict(
                    f"part {name!r} has {part.bytes} bytes and this range starts at {start}; send "
                    f"from {part.bytes}"
                )
            if start + len(data) > part.total:
                raise InvalidRequest(
                    f"part {name!r} has {part.total} bytes in all and this range reaches "
                    f"{start + len(data)}; send the range in Content-Range"
                )
            path, mode = upload.directory / name, "r+b" if part.bytes else "w+b"
            with open(path, mode, opener=private_file) as file:
                file.seek(start)
                again = data[: part.bytes - start]
                if file.read(len(again)) != again:
                    raise Conflict(
                        f"part {name!r} was sent with other bytes before, somewhere in [{start}, "
                        f"{start + len(again)}); abort the version to start again"
                    )
                file.write(memoryview(data)[len(again) :])
            part.bytes = max(part.bytes, start + len(data))

    # pushes

    def seal(self, version: str) -> Sealed:
        """Return the directory that the engine may read; nothing writes to it until `release`.
        `Conflict` while parts are incomplete.
        """
        upload = self._uploads.get(version)
        if upload is None:
            return Sealed(_named(version), None)  # the engine knows whether it had the version
        for name, part in upload.parts.items():
            if part.bytes < part.total:
                raise Conflict(
                    f"part {name!r} of version {version!r} has {part.bytes} of {part.total} bytes; "
                    "send the rest, then push"
                )
        upload.pushes += 1
        return Sealed(upload.directory.name, upload)

    def sealed(self, version: str) -> Path | None:
        """Return the directory of a version that is being pushed; None without such a push."""
        upload = self._uploads.get(version)
        return upload.directory if upload is not None and upload.pushes else None

    def release(self, version: str, sealed: Sealed, *, keep: bool) -> None:
        """Release a `seal` after its push. Without `keep` the upload ends as soon as no other push
        reads it.
        """
        upload = sealed.upload
        if upload is not None:
            upload.pushes -= 1
            upload.dropped |= not keep
            if upload.dropped and not upload.pushes:
                self._remove(version)

    def drop(self, version: str) -> bool:
        """End an upload, now or with the push that reads it. Return True if it has ended now."""
        upload = self._uploads.get(version)
        if upload is not None and upload.pushes:
            upload.dropped = True
        return self.forget(version)

    def forget(self, version: str) -> bool:
        """End an upload that no push reads. Return False if there is none."""
        upload = self._uploads.get(version)
        if upload is None or upload.pushes:
            return False
        self._remove(version)
        return True

    def _remove(self, version: str) -> None:
        """Forget an upload, so that its version may be sent again at once. A thread removes its
        files, which may be large and count until then.
        """
        upload = self._uploads.pop(version)
        upload.ended, self._leaving[upload.directory] = True, upload.total
        self._removing.give(partial(self._remove_files, upload))

    def _remove_files(self, upload: _Upload) -> None:
        with self._lock:
            pass  # a piece that was being written is complete, and no other one starts
        shutil.rmtree(upload.directory, ignore_errors=True)
        del self._leaving[upload.directory]

    def _expire_later(self, version: str, upload: _Upload) -> None:
        loop, ttl_s = asyncio.get_running_loop(), self._config.upload_ttl_s

        def look() -> None:
            left_s = upload.touched_s + ttl_s - loop.time()
            if self._uploads.get(version) is not upload:
                return
            if left_s <= 0 and not upload.pushes:
                self._remove(version)
            else:
                loop.call_later(max(left_s, 1.0), look)

        loop.call_later(ttl_s, look)


def _named(version: str) -> str:
    return hashlib.sha256(version.encode()).hexdigest()[:32]


def _not_kept(part: str, error: OSError) -> StorageFailed:
    return StorageFailed(
        f"part {part!r} cannot be written below the state directory ({error}); make room and send "
        "it on"
    )
