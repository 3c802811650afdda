"""A stream between a gateway and a simulated server, in place of a channel and a call of gRPC.

Messages keep their order, and those that are sent in one turn of the loop arrive in one. They are
late by the server's `delay_s`, and wait while it is cut off. An end travels as a message does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from tlt_client.errors import ConnectionFailed
from tlt_server.errors import Cancelled, TltError
from tlt_server.wire.link import Attach, Ended, LinkCommand, Ping, decode_link_command
from tlt_server.wire.records import encode

if TYPE_CHECKING:
    from tlt_server.bench.fleets.machine import Machine

Sent = bytes | Exception  # a message, or the end of the stream


class Direction:
    """One way of a stream."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._on_way = deque[tuple[float, Sent]]()  # with their times of arrival
        self._arrived = deque[Sent]()
        self._some = asyncio.Event()

    def send(self, message: Sent) -> None:
        loop = asyncio.get_running_loop()
        last_s = self._on_way[-1][0] if self._on_way else 0.0
        at_s = max(loop.time() + self._machine.delay_s, last_s)
        self._on_way.append((at_s, message))
        loop.call_at(at_s, self.arrive)

    def arrive(self) -> None:
        """Let all arrive that is due."""
        if self._machine.cut:
            self._machine.held.append(self.arrive)
            return
        now_s = asyncio.get_running_loop().time()
        while self._on_way and self._on_way[0][0] <= now_s:
            self._arrived.append(self._on_way.popleft()[1])
            self._some.set()

    async def next(self) -> bytes:
        while not self._arrived:
            self._some.clear()
            await self._some.wait()
        first = self._arrived.popleft()
        if isinstance(first, Exception):
            raise first
        return first


class Wire:
    """A channel and a call of gRPC for the gateway, and the transport of `Attachments`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._there, self._back = machine, Direction(machine), Direction(machine)
        self._attach: Attach | None = None

    async def __aenter__(self) -> Wire:
        if self._machine.cut or not self._machine.serve(self._serve()):
            raise ConnectionFailed(f"{self._machine.name} was not reached")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._there.send(Cancelled("the gateway has ended the stream"))

    def stream_stream(self, method: str) -> Callable[..., Wire]:
        return lambda metadata: self

    async def write(self, message: bytes) -> None:
        self._there.send(message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._back.next()

    async def _serve(self) -> None:
        try:
            attach = decode_link_command(await self._there.next())
            assert isinstance(attach, Attach)
            self._attach = attach
            await self._machine.attachments.serve(attach, self._read, self._write)
        except TltError as error:
            await self._write(encode([Ended.of(error)]))
        finally:
            self._back.send(ConnectionFailed(f"{self._machine.name} has left the stream"))

    async def _read(self) -> LinkCommand:
        command: LinkCommand = decode_link_command(await self._there.next())
        if self._attach is not None and not isinstance(command, Ping):
            self._machine.ordered(self._attach.epoch)
        return command

    async def _write(self, message: bytes) -> None:
        if self._machine.up and self._attach is not None:
            self._machine.epoch = max(self._machine.epoch, self._attach.epoch)
            self._back.send(message)
