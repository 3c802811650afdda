"""A local connection of two processes of one user: where they meet, and messages that are one
struct each.

They meet at a socket in a directory which the server has made for its user alone; both ends look at
whose it is, and at who the other is.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tlt_client.channels.errors import ChannelLost, ContentRefused, PlaceForbidden
from tlt_client.channels.memory import GRANT, Grant, SharedMemory, opened

PEER = struct.Struct("3i")  # process, user, group


def made_directory(within: Path | None = None) -> Path:
    """For an engine's sockets; goes with the process, and after one that was killed with `within`,
    which is somebody else's.
    """
    directory = Path(tempfile.mkdtemp(prefix="tlt-ipc-", dir=within))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


class Line:
    """A connection of two processes of one user. What breaks it, or takes longer than `timeout_s`,
    is `ChannelBroken`.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        connection.settimeout(timeout_s)
        _, user, _ = PEER.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        )
        if user != os.geteuid():
            raise PlaceForbidden(
                f"the other end runs as user {user}, this one as {os.geteuid()}; run trainer and server as one user"
            )

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        with self._bounded("sending"):
            socket.send_fds(self._connection, [data], descriptors)

    def receive(self, size: int) -> bytes:
        """One message of `size` bytes; descriptors that come with it are closed unseen."""
        with self._bounded("receiving"):
            return self._whole(self._connection.recv(size + 1), size)

    def receive_memory(self) -> SharedMemory:
        with self._bounded("receiving"):
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, GRANT.size + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        try:
            return opened(Grant.parsed(self._whole(data, GRANT.size)), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self) -> None:
        """Nothing more is sent."""
        with self._bounded("ending"):
            self._connection.shutdown(socket.SHUT_WR)

    def receive_end(self) -> None:
        with self._bounded("receiving the end"):
            if self._connection.recv(1):
                raise ContentRefused(
                    "more came than the manifest names; send its buckets, each once, and end the stream"
                )

    def stop(self) -> None:
        """From another thread: whoever waits here finds the other side gone, and so does that."""
        with contextlib.suppress(OSError):  # it is gone, or closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _whole(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise ChannelLost(
                f"a message of {len(data)} bytes came where {size} were due; push again"
                if data
                else "the other side has gone in the middle of a push; push again"
            )
        return data

    @contextlib.contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ChannelLost(
                f"the connection broke while {doing}, or {self._timeout_s:g} s passed ({error}); push again"
            ) from None


def entered(directory: Path) -> int:
    """A descriptor of a directory that is ours alone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ChannelLost(
            f"the server's directory of sockets, {directory}, cannot be entered ({error.strerror}); by ipc trainer and "
            "server run on one host, in one container, as one user"
        ) from None
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise PlaceForbidden(
            f"{directory} is open to others (user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}); restart the "
            "server, which makes it for its user alone, and run the trainer as that user"
        )
    return descriptor


def address(directory: int, name: str) -> str:
    """Of a socket in an open directory, whose own path may be longer than a socket's may be."""
    return f"/proc/self/fd/{directory}/{name}"
