"""Channel `peer`: the files of a version that another server of the fleet keeps, over HTTP.

There is only the engine's half: a gateway sends the manifests, whose `path` names the sources. The
files come in slices over several connections into a directory below the spool and are then read as
`http` reads its parts. Each slice must have the digest that the source's list gives. A source that
breaks off, changes or stays silent is left for the next one; a busy one is asked again later.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import sample
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Meta, Struct

from tlt_client.arguments import bearer
from tlt_client.channels import Announcement, Intake, pushed
from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.errors import ChannelLost, ContentRefused
from tlt_client.channels.http import HttpReceiver
from tlt_client.channels.source import OpenFile, Source
from tlt_client.errors import InvalidArgument
from tlt_client.tls import Tls

T = TypeVar("T")
PATH = "/weights/files"
SLICE_BYTES = 2**24  # size of a reply
CONNECTIONS = 4
SILENT_S = 10.0  # longest pause of a connection
SLOW_S = 60.0  # for a reply, or until the list begins
BUSY_S = 600.0  # for busy sources to have time
MAX_LIST_BYTES, MAX_FILES, MAX_NAME, MAX_ERROR_BYTES = 2**24, 4096, 255, 2**16
MAX_QUOTE = 200  # characters of foreign text that a message quotes
BUSY = 503
SAFETENSORS = ".safetensors"


class PeerFile(Struct, frozen=True):
    """A file of a version."""

    name: Annotated[str, "file name", Meta(min_length=1, max_length=MAX_NAME)]
    bytes: Annotated[int, "its size", Meta(ge=0, le=2**45)]
    digests: Annotated[list[str], "xxh3 of each 16 MiB, in order"]

    @property
    def usable(self) -> bool:
        known = self.name.endswith(SAFETENSORS) or self.name in (CALIBRATION, ADAPTER_CONFIG)
        whole = len(self.digests) == -(-self.bytes // SLICE_BYTES)
        return known and whole and Path(self.name).name == self.name and "\0" not in self.name

    def slices(self) -> Iterator[FileSlice]:
        for start, digest in zip(range(0, self.bytes, SLICE_BYTES), self.digests, strict=True):
            yield FileSlice(self.name, start, min(SLICE_BYTES, self.bytes - start), digest)


class PeerFiles(Struct, frozen=True):
    """The files of one version."""

    role: Annotated[str, "whose weights"]
    version: Annotated[str, "their version"]
    digest: Annotated[str, "of the version's tensors; empty: not known before they are pushed"]
    files: Annotated[
        list[PeerFile],
        "safetensors files, calibration, an adapter's config",
        Meta(max_length=MAX_FILES),
    ]


class _Fault(Exception):
    """The reason why a source is left."""


class _Busy(_Fault):
    """The source asks to wait for `wait_s`."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


FAULTS = (_Fault, ContentRefused, InvalidArgument, TimeoutError)


class FileSlice(NamedTuple):
    """One slice of a file."""

    name: str
    start: int
    bytes: int
    digest: str


class PeerConnections:
    """Connections to one source, one for each thread, which has one buffer for what it reads."""

    def __init__(self, address: str, key: str, tls: Tls, query: dict[str, str]) -> None:
        """`query`: of every request."""
        self._address, self._query, self._headers = urlsplit(address), query, bearer(key or None)
        self._context = tls.context() if self._address.scheme == "https" else None
        self._own = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def read(self, name: str, asked: FileSlice | None = None) -> memoryview:
        """Return the bytes of a slice until the thread's next call; without one, the list of files.
        Any failure is a `_Fault`.
        """
        query = self._query | ({"start": str(asked.start)} if asked else {})
        try:
            connection = self._connection()
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(SILENT_S if asked else SLOW_S)
            connection.request("GET", f"{PATH}{name}?{urlencode(query)}", headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            size = response.length
            if size is None or size > MAX_LIST_BYTES or (asked and size != asked.bytes):
                raise _Fault(f"{size} bytes came instead of {asked.bytes if asked else 'a list'}")
            data = self._buffer(size)
            if response.readinto(data) != size:
                raise _Fault("a reply broke off")
        except (OSError, http.client.HTTPException) as error:
            raise _Fault(str(error) or type(error).__name__) from None
        return data

    def _connection(self) -> http.client.HTTPConnection:
        held: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if held is None:
            host, port = self._address.hostname or "", self._address.port
            held = self._own.connection = (
                http.client.HTTPSConnection(host, port, timeout=SILENT_S, context=self._context)
                if self._context
                else http.client.HTTPConnection(host, port, timeout=SILENT_S)
            )
            self._open.append(held)
        return held

    def _buffer(self, size: int) -> memoryview:
        held: memoryview | None = getattr(self._own, "buffer", None)
        if held is None or len(held) < size:
            held = self._own.buffer = memoryview(bytearray(size))
        return held[:size]

    def close(self) -> None:
        """End every wait. Called from any thread."""
        for connection in [*self._open]:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


class PulledSource(Source):
    """The directory of files that still come. Opening one waits for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.parent, directory.name)
        self.wait: Callable[[str], None] = lambda name: None

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        self.wait(name)
        self._read.pop(name, None)  # it was still written to when its header was read
        with super().opened(name) as file:
            yield file


class PeerReceiver(HttpReceiver):
    """Gets the files while the engine takes those that are complete. Until their headers are there
    any other source may replace one that fails; from then on, one with the same files.
    """

    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.pulled is not None
        self._push, self._tls, found = push, Tls(**intake.tls), sources_of(push.path)
        # In any order, so that takers spread, and a next try begins elsewhere.
        self._left = sample(found, len(found))
        self._faults: dict[str, str] = {}  # source -> why it was left
        self._stopped, self._give_up_s = threading.Event(), time.monotonic() + BUSY_S
        self._place = Path(tempfile.mkdtemp(prefix="push-pulled-", dir=intake.pulled))
        self._found: PeerFiles | None = None
        self._done: set[FileSlice] = set()
        self._tasks: dict[str, list[Future[None]]] = {}  # file -> its slices, in order
        self._pool: ThreadPoolExecutor | None = None  # None: no source is asked
        self._connections: PeerConnections | None = None

    def fetch(self) -> None:
        """Get the list and the headers of all files. The rest comes meanwhile."""
        source = self._tried(self._headers)
        source.wait = lambda name: self._tried(lambda: _wait(self._tasks[name]))
        self.names = {
            role: {each.spec.name: each.where for each in self.layouts if each.role == role}
            for role in pushed(self._push.role)
        }
        self.places = dict.fromkeys(self.names, f"version {self._push.version!r}")
        if self._found is not None and self._found.digest:
            self.digests = {self._push.role: self._found.digest}

    def _headers(self) -> PulledSource:
        for tasks in self._tasks.values():
            _wait(tasks[:1])
        source = PulledSource(self._place / "files")
        self.read_headers(source, self._push)
        return source

    def _tried(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, with the next source after each fault. `ChannelLost` if there
        is none.
        """
        while self._left and not self._stopped.is_set():
            try:
                if self._pool is None:
                    self._begin(self._left[0])
                return act()
            except FAULTS as fault:
                self._leave(fault)
        push, reasons = self._push, "; ".join(map(": ".join, self._faults.items()))
        raise ChannelLost(
            f"no server gave version {push.version!r} of the {push.role} "
            f"({reasons or 'the push was ended'}); push again, or name other servers"
        )

    def _leave(self, fault: Exception) -> None:
        """Leave the present source. A busy one is asked again after the others."""
        self._halt()
        source = self._left.pop(0)
        self._faults[source] = str(fault) or f"a reply took longer than {SLOW_S:g} s"
        if isinstance(fault, _Busy) and time.monotonic() < self._give_up_s:
            self._left.append(source)
            if self._faults.keys() >= {*self._left}:
                self._stopped.wait(fault.wait_s)

    def _begin(self, source: str) -> None:
        """Get the list of a source, and start to get the slices that are missing."""
        push, directory = self._push, self._place / "files"
        query = {"role": push.role, "adapter": push.adapter, "version": push.version}
        query["taker"] = self._place.name
        self._connections = connections = PeerConnections(source, push.key, self._tls, query)
        self._pool = pool = ThreadPoolExecutor(CONNECTIONS, "pull weights")
        found = _checked(pool.submit(connections.read, "").result(SLOW_S), push.version)
        if self._found is None or found.files != self._found.files:
            if self.layouts:
                raise _Fault("it has other files than the server before")
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(0o700)
            self._done.clear()
            for file in found.files:
                (directory / file.name).touch(0o600)
                os.truncate(directory / file.name, file.bytes)
        self._found, self._tasks = found, {file.name: [] for file in found.files}
        slices = [each for file in found.files for each in file.slices()]
        for each in sorted(slices, key=lambda each: each.start > 0):  # headers first
            self._tasks[each.name].append(pool.submit(self._take, connections, each))

    def _take(self, connections: PeerConnections, asked: FileSlice) -> None:
        if asked in self._done:
            return
        if self._stopped.is_set():
            raise _Fault("the push was ended")
        data = connections.read("/" + quote(f"{self._push.role}/{asked.name}"), asked)
        if xxh3(data) != asked.digest:
            raise _Fault(f"{asked.name} has other bytes from {asked.start} on than announced")
        with open(self._place / "files" / asked.name, "r+b", buffering=0) as file:
            file.seek(asked.start)
            while data:
                data = data[file.write(data) :]
        self._done.add(asked)

    def _halt(self) -> None:
        """End all transfers."""
        if self._pool is not None and self._connections is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._connections.close()
            self._pool.shutdown()
            self._pool = None

    def stop(self) -> None:
        self._stopped.set()
        if self._connections is not None:
            self._connections.close()

    def close(self) -> None:
        self._halt()
        shutil.rmtree(self._place, ignore_errors=True)


def _wait(tasks: Sequence[Future[None]]) -> None:
    for task in tasks:
        task.result(SLOW_S)


def sources_of(path: str) -> list[str]:
    """Return the addresses in a manifest."""
    for address in path.split():
        try:
            parts = urlsplit(address)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            sound = False
        if not sound or "@" in address or parts.path.strip("/") or parts.query or parts.fragment:
            shown = address.rpartition("@")[2][:MAX_QUOTE]
            raise ContentRefused(
                f"path names {shown!r}; each source must be an address such as "
                "http://10.0.0.3:8000, with a space between two"
            )
    if not path.split():
        raise ContentRefused("path is empty; a push by peer names the servers that have the files")
    return path.split()


def _checked(data: memoryview, version: str) -> PeerFiles:
    try:
        found = msgspec.json.decode(data, type=PeerFiles)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"its list is not read ({error})") from None
    if found.version != version:
        raise _Fault(f"it has version {found.version[:MAX_QUOTE]!r}")
    names = {file.name for file in found.files if file.usable}
    if len(names) < len(found.files) or not any(name.endswith(SAFETENSORS) for name in names):
        raise _Fault("its list has names, sizes or digests that no files of weights have")
    return found


def _refused(response: http.client.HTTPResponse) -> _Fault:
    """Return the reason in a reply that is not 200; a redirect is not followed."""
    try:
        message = msgspec.json.decode(response.read(MAX_ERROR_BYTES))["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.reason
    said = f"HTTP {response.status}, {str(message)[:MAX_QUOTE]}"
    after = response.getheader("Retry-After", "")
    if response.status == BUSY and after.isascii() and after.isdigit():
        return _Busy(said, min(float(after), SILENT_S))
    return _Fault(said)
