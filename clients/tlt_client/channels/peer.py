"""Channel `peer`: the files of a version that another server of the fleet keeps, over HTTP.

There is only the engine's half: a gateway sends the manifests, whose `path` names the sources. All
files come, in slices over several connections, into a directory below the spool and are then read
as `http` reads its parts. Each slice must have the digest that the source's list gives. A source
that breaks off or stays silent is left for the next one; a busy one is asked again later.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from random import sample
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Meta, Struct

from tlt_client.arguments import bearer
from tlt_client.channels import Announcement, Intake, pushed
from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.errors import ChannelLost, ContentRefused
from tlt_client.channels.http import HttpReceiver
from tlt_client.channels.source import Source
from tlt_client.errors import InvalidArgument
from tlt_client.tls import Tls

PATH, FILES = "/weights/files", "files"
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
    """Connections to one source, each with the buffer that it reads into."""

    def __init__(self, address: str, key: str, tls: Tls, query: dict[str, str]) -> None:
        """`query`: of every request."""
        parts, self._query, self._headers = urlsplit(address), query, bearer(key or None)
        context = tls.context() if parts.scheme == "https" else None
        host, port, self._all = parts.hostname or "", parts.port, list[http.client.HTTPConnection]()
        self._free = SimpleQueue[tuple[http.client.HTTPConnection, memoryview]]()
        for _ in range(CONNECTIONS):
            made = (
                http.client.HTTPSConnection(host, port, timeout=SILENT_S, context=context)
                if context
                else http.client.HTTPConnection(host, port, timeout=SILENT_S)
            )
            self._all.append(made)
            self._free.put((made, memoryview(bytearray(MAX_LIST_BYTES))))

    @contextmanager
    def read(self, name: str = "", asked: FileSlice | None = None) -> Iterator[memoryview]:
        """Yield the bytes of a slice; without one, the list of files. Any failure is a `_Fault`."""
        query = self._query | ({"start": str(asked.start)} if asked else {})
        connection, buffer = self._free.get()
        try:
            size = self._receive(connection, buffer, f"{PATH}{name}?{urlencode(query)}", asked)
            yield buffer[:size]
        finally:
            self._free.put((connection, buffer))

    def _receive(
        self,
        connection: http.client.HTTPConnection,
        buffer: memoryview,
        url: str,
        asked: FileSlice | None,
    ) -> int:
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(SILENT_S if asked else SLOW_S)
            connection.request("GET", url, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            size = response.length
            if size is None or size > len(buffer) or (asked and size != asked.bytes):
                raise _Fault(f"{size} bytes came instead of {asked.bytes if asked else 'a list'}")
            if response.readinto(buffer[:size]) != size:
                raise _Fault("a reply broke off")
        except (OSError, http.client.HTTPException) as error:
            raise _Fault(str(error) or type(error).__name__) from None
        return size

    def close(self) -> None:
        """End every wait. Called from any thread."""
        for connection in self._all:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


class PeerReceiver(HttpReceiver):
    """Gets all files, from one source after the other until they are whole. The next source need
    not give again what came, if it has the same files.
    """

    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.pulled is not None
        self._push, self._tls, found = push, Tls(**intake.tls), sources_of(push.path)
        # In any order, so that takers spread, and a next try begins elsewhere.
        self._sources = sample(found, len(found))
        self._place = Path(tempfile.mkdtemp(prefix="push-pulled-", dir=intake.pulled))
        self._found: PeerFiles | None = None
        self._done: set[FileSlice] = set()
        self._stopped = threading.Event()
        self._connections: PeerConnections | None = None  # to the present source

    def fetch(self) -> None:
        push, left, faults = self._push, [*self._sources], dict[str, str]()
        give_up_s = time.monotonic() + BUSY_S
        while left and not self._stopped.is_set():
            source = left.pop(0)
            try:
                found = self._pull(source)
                self.read_headers(Source(self._place, FILES), push)
                break
            except FAULTS as fault:
                faults[source] = str(fault) or f"a reply took longer than {SLOW_S:g} s"
                if isinstance(fault, _Busy) and time.monotonic() < give_up_s:
                    left.append(source)
                    if faults.keys() >= {*left}:
                        self._stopped.wait(fault.wait_s)
        else:
            reasons = "; ".join(map(": ".join, faults.items())) or "the push was ended"
            raise ChannelLost(
                f"no server gave version {push.version!r} of the {push.role} ({reasons}); push "
                "again, or name other servers"
            )
        self.names = {
            role: {each.spec.name: each.where for each in self.layouts if each.role == role}
            for role in pushed(push.role)
        }
        self.places = dict.fromkeys(self.names, f"version {push.version!r}")
        self.digests = {push.role: found.digest} if found.digest else {}

    def _pull(self, source: str) -> PeerFiles:
        """Get what is missing from a source, and return its list."""
        push = self._push
        query = {"role": push.role, "adapter": push.adapter, "version": push.version}
        query["taker"] = self._place.name
        self._connections = connections = PeerConnections(source, push.key, self._tls, query)
        pool = ThreadPoolExecutor(CONNECTIONS, "pull weights")
        try:
            found = pool.submit(self._list, connections).result(SLOW_S)
            slices = [each for file in found.files for each in file.slices()]
            tasks = [pool.submit(self._take, connections, each) for each in slices]
            for task in tasks:
                task.result(SLOW_S)
            return found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            connections.close()
            pool.shutdown()

    def _list(self, connections: PeerConnections) -> PeerFiles:
        """Return the list of a source. Begin again if the files are not those of the one before."""
        with connections.read() as data:
            found = _checked(data, self._push.version)
        if self._found is None or found.files != self._found.files:
            directory = self._place / FILES
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(0o700)
            self._done.clear()
            for file in found.files:
                (directory / file.name).touch(0o600)
                os.truncate(directory / file.name, file.bytes)
        self._found = found
        return found

    def _take(self, connections: PeerConnections, asked: FileSlice) -> None:
        if asked in self._done:
            return
        if self._stopped.is_set():
            raise _Fault("the push was ended")
        with connections.read("/" + quote(f"{self._push.role}/{asked.name}"), asked) as data:
            if xxh3(data) != asked.digest:
                raise _Fault(f"{asked.name} has other bytes from {asked.start} on than announced")
            with open(self._place / FILES / asked.name, "r+b", buffering=0) as file:
                file.seek(asked.start)
                while data:
                    data = data[file.write(data) :]
        self._done.add(asked)

    def stop(self) -> None:
        self._stopped.set()
        if self._connections is not None:
            self._connections.close()

    def close(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)


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
                f"{shown!r} is not a source; each must be an address such as "
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
