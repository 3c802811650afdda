"""Versions on their way by http: parts below the state directory, bounded in number, size and age,
until a push or an abort ends them.

A part grows from its beginning only. Bytes that come again must be the same bytes, so whoever lost
a connection may send from any earlier place; what would leave a gap is refused with the place to go
on from. Nothing survives a restart of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from tlt_server.config import Config
from tlt_server.errors import Conflict, InvalidRequest, NotFound, StorageFailed
from tlt_server.threads import Errands

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors", re.ASCII)
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
PIECE_BYTES = 2**20  # that are written at once


class PartStatus(Struct, frozen=True):
    """How much of a part is there."""

    part: Annotated[str, Meta(description="its name")]
    bytes: Annotated[
        int, Meta(description="that are there, from its beginning; the next range begins here")
    ]
    total: Annotated[int, Meta(description="that it will have")]
    begins: Annotated[
        bool,
        Meta(
            description="the version's upload began with this call, so that its sender may take it back"
        ),
    ] = False


class UploadStatus(Struct, frozen=True):
    """A version on its way by http."""

    version: Annotated[str, Meta(description="that its parts belong to")]
    parts: Annotated[int, Meta(description="that were begun")]
    bytes: Annotated[int, Meta(description="that are there")]
    total: Annotated[int, Meta(description="that the parts begun will have")]
    age_s: Annotated[float, Meta(description="since its first byte")]
    idle_s: Annotated[float, Meta(description="since its last byte; it is kept for upload_ttl_s")]


@dataclass
class _Part:
    total: int
    bytes: int = 0


@dataclass
class _Upload:
    directory: Path
    parts: dict[str, _Part] = field(default_factory=dict)
    begun_s: float = 0.0  # by the loop's clock
    touched_s: float = 0.0
    pushes: int = 0  # that read it now
    writing: int = 0  # calls that bring parts of it
    dropped: bool = False  # while a push read it, and goes with that push
    ended: bool = False  # and its directory is being removed

    @property
    def total(self) -> int:
        """Bytes that it will have."""
        return sum(part.total for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """That are there."""
        return sum(part.bytes for part in self.parts.values())


class Sealed(NamedTuple):
    """What a push reads."""

    path: str  # of its directory, below the uploads' own
    upload: _Upload | None  # None: there was none


def uploads_of(config: Config) -> Uploads | None:
    """Return the uploads of a server that takes weights by http, or None."""
    return Uploads(config) if "http" in config.channels else None


class Uploads:
    """Called in the frontend's loop; files are written in threads, one at a time."""

    def __init__(self, config: Config) -> None:
        assert config.state_dir is not None
        self._directory, self._config = config.state_dir / "uploads", config
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, parents=True)
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()  # a version that comes anew has another directory
        self._removing = Errands("remove uploads")
        self._leaving: dict[Path, int] = {}  # bytes of ended uploads that are not removed yet

    def listed(self) -> list[UploadStatus]:
        """All, oldest first."""
        now_s = asyncio.get_running_loop().time()
        return [
            UploadStatus(
                version,
                len(upload.parts),
                upload.bytes,
                upload.total,
                round(now_s - upload.begun_s, 3),
                round(now_s - upload.touched_s, 3),
            )
            for version, upload in self._uploads.items()
        ]

    def status(self, version: str, part: str) -> PartStatus:
        upload = self._uploads.get(version)
        if upload is None or part not in upload.parts:
            raise NotFound(
                f"there is no part {part[:80]!r} of version {version[:80]!r} on its way; send it from its first byte"
            )
        return PartStatus(part, upload.parts[part].bytes, upload.parts[part].total)

    async def write(
        self, version: str, part: str, start: int, total: int, body: AsyncIterator[bytes]
    ) -> PartStatus:
        """Take a range of a part. What has come when `body` breaks off is kept, all but the last
        piece of a call that is cancelled while it writes; an upload of which no byte has come by
        then takes no place.
        """
        begins = version not in self._uploads
        upload = self._opened(version, part, total)
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
        """One piece is written while the next one comes."""
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

    def _opened(self, version: str, part: str, total: int) -> _Upload:
        """The upload with an entry for this part, where there is room for it."""
        config = self._config
        if not PART.fullmatch(part):
            raise InvalidRequest(
                f"part is {part[:80]!r}; name it with letters, digits, '.', '_' and '-', ending in .safetensors"
            )
        upload = self._uploads.get(version)
        if upload is None and len(self._uploads) >= config.max_uploads:
            raise StorageFailed(
                f"{len(self._uploads)} versions are on their way, the limit is {config.max_uploads} (max_uploads); push or "
                f"abort one of {sorted(self._uploads)} (GET /weights says how old each is)"
            )
        there = upload.parts.get(part) if upload is not None else None
        if there is not None and there.total != total:
            raise Conflict(
                f"part {part!r} was begun with {there.total} bytes in all, now it has {total}; abort the version to begin anew"
            )
        if there is None:
            held = sum(upload.total for upload in self._uploads.values()) + sum(
                self._leaving.copy().values()
            )
            if held + total > config.max_upload_mb * 2**20:
                raise StorageFailed(
                    f"part {part!r} has {total} bytes and {held} are on their way; the limit is {config.max_upload_mb} MiB "
                    "(max_upload_mb): push or abort what is there"
                )
            if upload is not None and len(upload.parts) >= config.max_upload_parts:
                raise StorageFailed(
                    f"version {version!r} has {len(upload.parts)} parts, the limit is {config.max_upload_parts} "
                    "(max_upload_parts); send larger ones"
                )
        if upload is None:
            upload = _Upload(
                self._directory / f"{_named(version)}-{next(self._numbers)}",
                begun_s=asyncio.get_running_loop().time(),
            )
            try:
                upload.directory.mkdir(mode=0o700)
            except OSError as error:
                raise _not_kept(part, error) from None
            self._uploads[version] = upload
            self._expire_later(version, upload)
        upload.parts.setdefault(part, _Part(total))
        upload.touched_s = asyncio.get_running_loop().time()
        return upload

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
                    f"part {name!r} belongs to a version that is being pushed; wait for the push to end"
                )
            if start > part.bytes:
                raise Conflict(
                    f"part {name!r} has {part.bytes} bytes and this range begins at {start}; send from {part.bytes}"
                )
            if start + len(data) > part.total:
                raise InvalidRequest(
                    f"part {name!r} has {part.total} bytes in all and this range reaches {start + len(data)}; send what "
                    "Content-Range says"
                )
            with open(upload.directory / name, "r+b" if part.bytes else "w+b") as file:
                file.seek(start)
                again = data[: part.bytes - start]
                if file.read(len(again)) != again:
                    raise Conflict(
                        f"part {name!r} came with other bytes before, somewhere in [{start}, {start + len(again)}); abort the "
                        "version to begin anew"
                    )
                file.write(memoryview(data)[len(again) :])
            part.bytes = max(part.bytes, start + len(data))

    # -- pushes --------------------------------------------------------------------------------------------------

    def seal(self, version: str) -> Sealed:
        """What the engine may read, as it is not written until `release`. `Conflict` while parts
        are incomplete.
        """
        upload = self._uploads.get(version)
        if upload is None:
            return Sealed(
                _named(version), None
            )  # not there: the engine knows whether it had it already
        for name, part in upload.parts.items():
            if part.bytes < part.total:
                raise Conflict(
                    f"part {name!r} of version {version!r} has {part.bytes} of {part.total} bytes; send the rest, then push"
                )
        upload.pushes += 1
        return Sealed(upload.directory.name, upload)

    def release(self, version: str, sealed: Sealed, *, keep: bool) -> None:
        """A push has ended; without `keep` its parts have served, once no other push reads them."""
        upload = sealed.upload
        if upload is not None:
            upload.pushes -= 1
            upload.dropped |= not keep
            if upload.dropped and not upload.pushes:
                self._remove(version)

    def drop(self, version: str) -> bool:
        """End an upload, now or with the push that reads it; whether that was now."""
        upload = self._uploads.get(version)
        if upload is not None and upload.pushes:
            upload.dropped = True
        return self.forget(version)

    def forget(self, version: str) -> bool:
        """End an upload that no push reads; whether there was one."""
        upload = self._uploads.get(version)
        if upload is None or upload.pushes:
            return False
        self._remove(version)
        return True

    def _remove(self, version: str) -> None:
        """The version may come anew at once; what it left, which may be many bytes, is removed by a
        thread and counts until then.
        """
        upload = self._uploads.pop(version)
        upload.ended, self._leaving[upload.directory] = True, upload.total
        self._removing.give(partial(self._remove_files, upload))

    def _remove_files(self, upload: _Upload) -> None:
        with self._lock:
            pass  # a piece that is being written has come to its end, and no other one begins
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
        f"part {part!r} cannot be written below the state directory ({error}); make room and send it on"
    )


def span(content_range: str, length: int | None) -> tuple[int, int]:
    """Where a body begins and how many bytes the part has in all."""
    if not content_range:
        if length is None:
            raise InvalidRequest(
                "the request has neither Content-Range nor Content-Length; send Content-Range: bytes FIRST-LAST/TOTAL"
            )
        return 0, length
    found = RANGE.fullmatch(content_range)
    first, last, total = map(int, found.groups()) if found else (0, 0, 0)
    if not first <= last < total or (length is not None and length != last + 1 - first):
        raise InvalidRequest(
            f"Content-Range is {content_range[:80]!r} for a body of {length} bytes; it must be bytes FIRST-LAST/TOTAL, "
            "the last included"
        )
    return first, total
