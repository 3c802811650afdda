"""Frames between the loop and the reading process: 4 bytes of length, then msgpack or plain bytes.
An empty frame ends a message.

A request is a header (job and arguments), then payload. A reply is the pieces of one value
(`trees`), or an error.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator

FRAME_BYTES = 2**15  # size that pieces of a value aim at
MAX_FRAME_BYTES = 2**18  # no frame is larger; one that says so comes from a broken process
END = b""


def framed(data: bytes) -> bytes:
    assert len(data) <= MAX_FRAME_BYTES, f"a frame of {len(data)} bytes"
    return len(data).to_bytes(4, "little") + data


def sliced(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of all parts in frames of bounded size."""
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(part), FRAME_BYTES):
            yield bytes(view[at : at + FRAME_BYTES])


class Channel:
    """One lane's socket, on the loop. Other requests run between frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, side: socket.socket) -> Channel:
        return cls(*await asyncio.open_connection(sock=side, limit=2 * FRAME_BYTES))

    async def send(self, frames: Iterable[bytes]) -> None:
        """Send a message."""
        for frame in frames:
            self._writer.write(framed(frame))
            await self._writer.drain()
            await asyncio.sleep(0)
        self._writer.write(framed(END))
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next frame. `EOFError`: the process is gone."""
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {length} bytes")
        data = await self._reader.readexactly(length)
        await asyncio.sleep(0)
        return data

    def close(self) -> None:
        self._writer.transport.abort()


class BlockingChannel:
    """The other end, in a thread of the reading process."""

    def __init__(self, side: socket.socket) -> None:
        self._file = side.makefile("rb", buffering=2**18)
        self._side = side

    def send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._side.sendall(framed(frame))
        self._side.sendall(framed(END))

    def receive(self) -> bytes:
        head = self._file.read(4)
        data = self._file.read(int.from_bytes(head, "little"))
        if len(head) < 4:
            raise EOFError("the server is gone")
        return data

    def message(self) -> Iterator[bytes]:
        """Yield frames up to the end of the message."""
        while data := self.receive():
            yield data
