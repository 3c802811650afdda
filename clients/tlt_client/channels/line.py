"""A local connection of two processes of one user; each message is one struct.

They connect by a socket in a directory that the server has created for its user alone. Both ends
check the directory's owner and the other end's user.
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
    """Create a directory for an engine's sockets, removed at the process's exit. If the process is
    killed, the owner of `within` removes it.
    """
    directory = Path(tempfile.mkdtemp(prefix="tlt-ipc-", dir=within))
    directory.chmod(0o700)  # the umask may be anything
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


class Line:
    """A connection of two processes of one user. Each method raises `ChannelLost` if it breaks or
    takes longer than `timeout_s`.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        connection.settimeout(timeout_s)
        _, user, _ = PEER.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        )
        if user != os.geteuid():
            raise PlaceForbidden(
                f"the other end runs as user {user}, this one as {os.geteuid()}; run trainer and "
                "server as one user"
            )

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        with self._bounded("sending"):
            socket.send_fds(self._connection, [data], descriptors)

    def receive(self, size: int) -> bytes:
        """Receive one message of `size` bytes; close descriptors sent with it."""
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
        """End the stream: nothing more is sent."""
        with self._bounded("ending"):
            self._connection.shutdown(socket.SHUT_WR)

    def receive_end(self) -> None:
        with self._bounded("receiving the end"):
            if self._connection.recv(1):
                raise ContentRefused(
                    "more buckets than the manifest names; send each bucket once, then end the "
                    "stream"
                )

    def stop(self) -> None:
        """End every wait on both sides with an error. Called from another thread."""
        with contextlib.suppress(OSError):  # the connection may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _whole(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise ChannelLost(
                f"a message of {len(data)} bytes came instead of {size}; push again"
                if data
                else "the other side went away in the middle of a push; push again"
            )
        return data

    @contextlib.contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ChannelLost(
                f"the connection broke while {doing}, or {self._timeout_s:g} s passed ({error}); "
                "push again"
            ) from None


def entered(directory: Path) -> int:
    """Open the server's directory of sockets, which must be private to this user."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ChannelLost(
            f"the server's directory of sockets, {directory}, cannot be entered "
            f"({error.strerror}); by ipc trainer and server run on one host, in one container, as "
            "one user"
        ) from None
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise PlaceForbidden(
            f"{directory} is open to others (user {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); restart the server, which makes it for its user "
            "alone, and run the trainer as that user"
        )
    return descriptor


def address(directory: int, name: str) -> str:
    """Return a socket's address relative to its open directory, as the whole path may be too
    long.
    """
    return f"/proc/self/fd/{directory}/{name}"
