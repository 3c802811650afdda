"""Files of committed weights, which other servers take: where they are, their sizes and digests,
and slices of them.

The files of a role are in the spool, or in the directory that the server was started with if no
push has replaced them. At most `MAX_TAKERS` servers take files at a time.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Struct

from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION, INDEX
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.source import MAX_SMALL_BYTES
from tlt_server.errors import Conflict, NotFound, Unavailable
from tlt_server.speculation.drafters import weights_directory
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.kept import CURRENT, WEIGHTS, Current, KeptVersion

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

MAX_SLICE = 2**23  # bytes of a reply; each has a digest
MAX_TAKERS = 4
TAKER_S = 5.0  # since its last request; then it is taken to have ended
KNOWN_FILES = 4096  # files whose digests are kept
READERS = 4  # files whose digests are computed at a time
DIGEST_S = 2.0  # a request's wait for digests; computing them goes on


class KeptFiles(NamedTuple):
    """A committed version of one role."""

    version: str
    digest: str  # the version's, from its tensors' mix64; empty before the first commit
    directory: Path


class WeightFile(Struct, frozen=True, kw_only=True):
    """A file of a version."""

    name: Annotated[str, "file name"]
    bytes: Annotated[int, "its size"]
    digests: Annotated[list[str], "xxh3 of each 8 MiB, in order"]


def live_files(config: ResolvedConfig, info: EngineInfo, role: str, adapter: str = "") -> KeptFiles:
    """Return the active version of a role. `Conflict` if the server does not keep it in files,
    `NotFound` without such an adapter, `Unavailable` during a commit.
    """
    started = {"target": config.model, "drafter": weights_directory(config.drafter)}.get(role)
    version = {"target": info.weight_version, "drafter": info.drafter_version}.get(role)
    if role == "adapter":
        version = info.adapters.get(adapter)
        if version is None:
            raise NotFound(f"adapter {adapter[:80]!r} is not loaded; load it here first")
    elif started is None:
        raise Conflict("no drafter with weights is loaded; tlt serve --drafter names one")
    spool = config.state_dir / WEIGHTS if config.state_dir is not None else None
    if spool is None or not spool.is_dir():  # as at a gateway
        raise Conflict(
            f"pushed weights of the {role} are not kept in files here; ask a server with an engine "
            "that was started with --state-dir"
        )
    current = _current(spool)
    kept = current.adapters.get(adapter) if role == "adapter" else current.roles.get(role)
    if kept is None:
        kept = KeptVersion(version=version or "", digest="", directory="")
    directory = spool / kept.directory if kept.directory else started
    if kept.version != version or directory is None:
        raise Unavailable("the weights are changing; ask again")
    return KeptFiles(kept.version, kept.digest, directory)


def _current(spool: Path) -> Current:
    try:
        return msgspec.json.decode((spool / CURRENT).read_bytes(), type=Current)
    except FileNotFoundError:
        return Current(model="", roles={})
    except (OSError, ValueError) as error:
        raise Conflict(f"{CURRENT} is not read ({error}); push the weights again") from None


def listed(directory: Path) -> dict[str, int]:
    """Return the files of a model's, drafter's or adapter's weights, with their sizes. If there is
    an index, only the tensor files that it names count.
    """
    found = {}
    if directory.is_dir():
        indexed = _indexed(directory / INDEX)
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            tensors = entry.name.endswith(".safetensors")
            named = entry.name in indexed if tensors and indexed else tensors
            if (named or entry.name in (CALIBRATION, ADAPTER_CONFIG)) and entry.is_file():
                found[entry.name] = entry.stat().st_size
    return found


def _indexed(index: Path) -> set[str]:
    """Return the files that an index names; none without a usable one."""
    try:
        if index.stat().st_size > MAX_SMALL_BYTES:
            return set()
        weight_map: Mapping[str, Any] = msgspec.json.decode(index.read_bytes(), type=dict)[
            "weight_map"
        ]
        return {name for name in weight_map.values() if isinstance(name, str)}
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def slice_of(path: Path, start: int) -> bytes:
    """Return at most `MAX_SLICE` bytes of a regular file, from `start` on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        return os.pread(descriptor, MAX_SLICE, start)
    finally:
        os.close(descriptor)


class WeightFiles:
    """The takers of a server's files, and the digests of these files."""

    def __init__(self) -> None:
        self._takers: dict[str, float] = {}  # taker -> its last request, by the loop's clock
        # File, size and times -> its digests, or their computation.
        self._digests: OrderedDict[tuple[Any, ...], asyncio.Task[list[str]]] = OrderedDict()
        self._reading = asyncio.Semaphore(READERS)

    def admit(self, taker: str) -> None:
        """Count a request of a taker. `Unavailable` if `MAX_TAKERS` others are at it."""
        now_s = asyncio.get_running_loop().time()
        self._takers = {
            name: last_s for name, last_s in self._takers.items() if now_s < last_s + TAKER_S
        }
        if taker not in self._takers and len(self._takers) >= MAX_TAKERS:
            raise Unavailable(
                f"{len(self._takers)} servers take files here, the limit is {MAX_TAKERS}; take "
                "them from another, or ask again",
                retry_after_s=1,
            )
        self._takers[taker] = now_s

    async def described(self, directory: Path) -> Sequence[WeightFile]:
        """Return the files of a directory. `Unavailable` while their digests are computed, which
        the first request starts. `Conflict` if one is removed meanwhile.
        """
        try:
            found = await asyncio.to_thread(listed, directory)
            tasks = {name: await self._task(directory / name) for name in found}
            if tasks:
                await asyncio.wait(tasks.values(), timeout=DIGEST_S)
            if not all(task.done() for task in tasks.values()):
                raise Unavailable("the files' digests are being computed", retry_after_s=1)
            return [
                WeightFile(name=name, bytes=size, digests=tasks[name].result())
                for name, size in found.items()
            ]
        except OSError as error:
            raise Conflict(f"a file has been removed ({error.strerror}); ask again") from None

    async def _task(self, path: Path) -> asyncio.Task[list[str]]:
        about = await asyncio.to_thread(path.stat)
        key = (path, about.st_ino, about.st_size, about.st_mtime_ns)
        if key not in self._digests or (
            self._digests[key].done() and self._digests[key].exception() is not None
        ):
            self._digests[key] = asyncio.create_task(self._computed(path, about.st_size))
        self._digests.move_to_end(key)
        while len(self._digests) > KNOWN_FILES:
            self._digests.popitem(last=False)
        return self._digests[key]

    async def _computed(self, path: Path, size: int) -> list[str]:
        async with self._reading:
            return await asyncio.to_thread(digests, path, size)


def digests(path: Path, size: int) -> list[str]:
    """Return the digest of each slice of a file of this size."""
    buffer, found = memoryview(bytearray(min(size, MAX_SLICE))), []
    with open(path, "rb", buffering=0) as file:
        for _ in range(math.ceil(size / MAX_SLICE)):
            count = file.readinto(buffer)
            found.append(xxh3(buffer[:count]))
    return found
