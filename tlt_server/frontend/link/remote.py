"""The way to a server on another host, as `link` and `supervisor` are to an engine process.

One gRPC stream carries commands and events (`wire.link`). The end of a stream is a death at once,
and so is a silence of 3 s; the death of the server's engine is reported over the stream. Streams
are tried again with growing pauses, for ever: whether a server is needed is not decided here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never, TypeAlias

import grpc
import msgspec

from tlt_client import Tls
from tlt_client.errors import ServerError
from tlt_client.rpc.errors import error_of
from tlt_server.errors import EngineFailed, TltError, from_code
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import Member
from tlt_server.wire.commands import Command, Stop
from tlt_server.wire.events import Ending, Ready
from tlt_server.wire.link import (
    METHOD,
    PING_S,
    Attach,
    Attached,
    Died,
    LinkCommand,
    Ping,
    Pong,
    command_messages,
    decode_link_event,
)

Stream: TypeAlias = grpc.aio.StreamStreamCall[Any, bytes]
SILENT_PINGS = 3  # without an answer, after which a server is taken for dead
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 5.0
LASTING_S = 1.0  # a stream that lasted so long is followed by another one at once
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # each try connects by itself
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


class RemoteLink:
    def __init__(
        self,
        address: str,
        attach: Callable[[], Attach],
        fleet: Fleet,
        member: Member,
        *,
        key: str = "",
        tls: Tls | None = None,
    ) -> None:
        """`address`: host and link port. `attach`: returns what to attach with now. `key`: an API
        key with the scope `link`.
        """
        self.address, self._attach, self._fleet, self._member = address, attach, fleet, member
        self._key, self._tls = key, tls
        self._queue: list[LinkCommand] = []
        self._some = asyncio.Event()
        self._ready = False  # the server's engine takes commands
        self._held = False  # it was attached before
        self._heard = 0  # number of events

    def send(self, command: Command) -> bool:
        """Send a command. Return False if there is no engine to take it."""
        if not self._ready or isinstance(command, Stop):
            return False
        self._put(command)
        return True

    async def run(self) -> Never:
        """Keep a stream to the server until this is cancelled, and report its events and ends."""
        failed = 0  # short streams in a row
        while True:
            heard, began_s = self._heard, time.monotonic()
            try:
                await self._live()
                failure: Exception = EngineFailed("the server has ended it")
            except Exception as other:  # another try may succeed
                failure = other
            error = self._error_of(failure)
            reached = self._heard > heard
            lasted = reached and time.monotonic() - began_s >= LASTING_S
            failed = 0 if lasted else failed + 1
            delay_s = min(FIRST_DELAY_S * 2.0 ** min(failed - 1, 32), MAX_DELAY_S) if failed else 0
            silent = isinstance(failure, TimeoutError)
            ending: Ending = "not_launched" if not reached else "hung" if silent else "exited"
            self._fleet.died(self._member, Death(ending, error, set()), delay_s, 0.0)
            await asyncio.sleep(delay_s)

    async def _live(self) -> None:
        """Run one stream until it ends."""
        metadata = (("authorization", f"Bearer {self._key}"),) if self._key else ()
        async with self._channel() as channel:
            call = channel.stream_stream(METHOD)(metadata=metadata)
            self._begin()
            works = (self._listen(call), self._write(call), self._ping())
            tasks = [asyncio.create_task(work) for work in works]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                next(task for task in tasks if task.done()).result()
            finally:
                self._ready = False
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def _error_of(self, failure: Exception) -> TltError:
        """Return the error of a stream that has ended, which is the server's own if it has one."""
        error = error_of(failure) if isinstance(failure, grpc.RpcError) else failure
        if isinstance(error, ServerError) and error.code != "unknown":
            return from_code(error.code, f"{self.address}: {error.message}")
        return EngineFailed(f"the link to {self.address} broke: {error}")

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, OPTIONS)
        ca, key, cert = (
            Path(file).read_bytes() if file is not None else None
            for file in (self._tls.ca, self._tls.key, self._tls.cert)
        )
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.aio.secure_channel(self.address, credentials, OPTIONS)

    def _begin(self) -> None:
        """Attach: at first, and after each death of the server's engine."""
        self._ready = False
        self._queue.clear()
        self._member.connect(self)
        attach = self._attach()
        if self._held:  # a displaced gateway does not displace its successor
            attach = msgspec.structs.replace(attach, take_over=False)
        self._put(attach)

    def _put(self, command: LinkCommand) -> None:
        self._queue.append(command)
        self._some.set()

    async def _write(self, call: Stream) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            queue, self._queue = self._queue, []
            for command in queue:
                for message in command_messages(command, time.monotonic()):
                    await call.write(message)

    async def _ping(self) -> None:
        """Raise `TimeoutError` once several pings in a row had no answer. Time is counted in turns
        of this loop, so a delayed loop blames no server.
        """
        silent, heard = 0, self._heard
        while silent < SILENT_PINGS:
            await asyncio.sleep(PING_S)
            silent, heard = silent + 1 if heard == self._heard else 0, self._heard
            self._put(Ping())
        raise TimeoutError(f"it was silent for {silent * PING_S:g} s")

    async def _listen(self, call: Stream) -> None:
        async for data in call:
            self._heard += 1
            match event := decode_link_event(data):
                case Pong():
                    continue
                case Attached():
                    self._held, self._member.url = True, reached(event.url, self.address)
                case Died(started=started, restart_in_s=restart_in_s, start_s=start_s):
                    self._ready = False
                    error = from_code(event.code, event.message)
                    death = Death(event.ending, error, set(started))
                    self._fleet.died(self._member, death, restart_in_s, start_s)
                    self._begin()
                case _:
                    self._ready |= isinstance(event, Ready)
                    self._fleet.take(event, self._member)


def reached(url: str, address: str) -> str:
    """Return a server's URL with the host by which it was reached, if it listens on all."""
    host = address.rpartition(":")[0]
    return url.replace("://0.0.0.0:", f"://{host}:").replace("://[::]:", f"://{host}:")
