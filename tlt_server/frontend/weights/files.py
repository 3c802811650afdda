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
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION, INDEX
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.peer import SLICE_BYTES, PeerFile
from tlt_client.channels.source import MAX_SMALL_BYTES
from tlt_server.errors import Conflict, NotFound, Unavailable
from tlt_server.speculation.drafters import weights_directory
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.kept import CURRENT, WEIGHTS, Current, KeptVersion

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

MAX_TAKERS = 4
TAKER_S = 2.0  # since its last request; then it is taken to have ended
KNOWN_FILES = 4096  # files whose digests are kept


class KeptFiles(NamedTuple):
    """A committed version of one role."""

    version: str
    digest: str  # the version's, from its tensors' mix64; empty before the first commit
    directory: Path


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


async def slice_of(path: Path, start: int, most: int) -> bytes:
    """Return at most `most` bytes of a file, from `start` on. `Conflict` if it is not there."""
    try:
        return await asyncio.to_thread(_read, path, start, most)
    except OSError as error:
        raise Conflict(f"the file has been removed ({error.strerror}); start again") from None


def _read(path: Path, start: int, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        return os.pread(descriptor, most, start)
    finally:
        os.close(descriptor)


class Takers:
    """The servers that take files, at most `MAX_TAKERS` at a time."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # taker -> its last request, by the loop's clock
        self.describing = asyncio.Lock()  # one computes digests, which the others then have

    def admit(self, taker: str) -> None:
        """Count a request of a taker. `Unavailable` if enough others take files."""
        now_s = asyncio.get_running_loop().time()
        self._seen = {name: at_s for name, at_s in self._seen.items() if now_s < at_s + TAKER_S}
        if taker not in self._seen and len(self._seen) >= MAX_TAKERS:
            raise Unavailable(
                f"{len(self._seen)} servers take files here, the limit is {MAX_TAKERS}; take them "
                "from another, or ask again",
                retry_after_s=1,
            )
        self._seen[taker] = now_s


def described(directory: Path) -> list[PeerFile]:
    """Return the files of a directory with their digests, which are computed once."""
    found = []
    for name in listed(directory):
        about = os.stat(directory / name)
        known = _digests(directory / name, about.st_size, about.st_ino, about.st_mtime_ns)
        found.append(PeerFile(name, about.st_size, known))
    return found


@lru_cache(KNOWN_FILES)
def _digests(path: Path, size: int, *stamp: int) -> list[str]:
    """Return the digest of each slice of a file of this size."""
    buffer, found = memoryview(bytearray(min(size, SLICE_BYTES))), []
    with open(path, "rb", buffering=0) as file:
        for _ in range(math.ceil(size / SLICE_BYTES)):
            count = file.readinto(buffer)
            found.append(xxh3(buffer[:count]))
    return found
