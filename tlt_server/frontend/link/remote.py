"""The way to a server on another host, as `link` and `supervisor` are to an engine process.

One gRPC stream carries commands and events (`wire.link`). The end of a stream is a death at once,
and so is a silence of 3 s; the server's last event may say more. Streams
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
from tlt_client.channels.peer import sources_of
from tlt_client.rpc.errors import error_of
from tlt_server.errors import EngineFailed, Unavailable, from_code
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import Member
from tlt_server.wire.commands import Command, Stop
from tlt_server.wire.events import Ending, Ready
from tlt_server.wire.link import (
    METHOD,
    PING_S,
    SPARE_BYTES,
    Attach,
    Attached,
    Ended,
    LinkCommand,
    Ping,
    command_messages,
    decode_link_events,
)

Stream: TypeAlias = grpc.aio.StreamStreamCall[Any, bytes]
SILENT_PINGS = 3  # without an answer, after which a server is taken for dead
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 5.0
LASTING_S = 1.0  # a stream that lasted so long is followed by another one at once
OPTIONS = [
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
        largest: int = SPARE_BYTES,
    ) -> None:
        """`address`: host and link port. `attach`: returns what to attach with now. `key`: an API
        key with the scope `link`. `largest`: bytes of an event.
        """
        self.address, self._attach, self._fleet, self._member = address, attach, fleet, member
        self._key, self._tls = key, tls
        self._options = [*OPTIONS, ("grpc.max_receive_message_length", min(largest, 2**31 - 1))]
        self._queue = asyncio.Queue[LinkCommand]()
        self._ready = False  # the server's engine takes commands
        self._held = False  # it was attached before
        self._heard = 0  # number of messages

    def send(self, command: Command) -> bool:
        """Send a command. Return False if there is no engine to take it."""
        if not self._ready or isinstance(command, Stop):
            return False
        self._queue.put_nowait(command)
        return True

    async def run(self) -> Never:
        """Keep a stream to the server until this is cancelled, and report its events and ends."""
        failed = 0  # short streams in a row
        while True:
            began_s = time.monotonic()
            ended = await self._live()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # a task group drops it if a task of its own fails
            lasted = self._heard and time.monotonic() - began_s >= LASTING_S
            failed = 0 if lasted else failed + 1
            delay_s = min(FIRST_DELAY_S * 2.0 ** min(failed - 1, 32), MAX_DELAY_S) if failed else 0
            error = from_code(ended.code, f"{self.address}: {ended.message}")
            death = Death(ended.ending, error, set(ended.started))
            restart_in_s = ended.restart_in_s
            if restart_in_s is not None:
                restart_in_s = max(restart_in_s, delay_s)
            blames = ended.code != Unavailable.code  # a server that drains ends by an order
            self._fleet.died(self._member, death, restart_in_s, ended.start_s, blames=blames)
            await asyncio.sleep(delay_s)

    async def _live(self) -> Ended:
        """Run one stream, and return how it ended."""
        metadata = (("authorization", f"Bearer {self._key}"),) if self._key else ()
        self._heard, self._queue = 0, asyncio.Queue()
        try:
            async with self._channel() as channel, asyncio.TaskGroup() as tasks:
                call = channel.stream_stream(METHOD)(metadata=metadata)
                self._member.connect(self)
                attach = self._attach()
                if self._held:  # a displaced gateway does not displace its successor
                    attach = msgspec.structs.replace(attach, take_over=False)
                self._queue.put_nowait(attach)
                others = [tasks.create_task(each) for each in (self._write(call), self._ping())]
                ended = await self._listen(call)
                for task in others:
                    task.cancel()
                return ended
        except Exception as failure:  # another try may succeed
            error = failure.exceptions[0] if isinstance(failure, ExceptionGroup) else failure
            ending: Ending = "hung" if isinstance(error, TimeoutError) else "exited"
            if isinstance(error, grpc.RpcError):
                error = error_of(error)
            return Ended(
                EngineFailed.code,
                f"the link broke: {error}",
                ending if self._heard else "not_launched",
            )
        finally:
            self._ready = False

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, self._options)
        ca, key, cert = (
            Path(file).read_bytes() if file is not None else None
            for file in (self._tls.ca, self._tls.key, self._tls.cert)
        )
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.aio.secure_channel(self.address, credentials, self._options)

    async def _write(self, call: Stream) -> None:
        while True:
            for message in command_messages(await self._queue.get(), time.monotonic()):
                try:
                    await call.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the stream has ended; what is left to read says why

    async def _ping(self) -> None:
        """Raise `TimeoutError` once several pings in a row had no answer. Time is counted in turns
        of this loop, so a delayed loop blames no server.
        """
        silent, heard = 0, self._heard
        while silent < SILENT_PINGS:
            await asyncio.sleep(PING_S)
            silent, heard = silent + 1 if heard == self._heard else 0, self._heard
            self._queue.put_nowait(Ping())
        raise TimeoutError(f"it was silent for {silent * PING_S:g} s")

    async def _listen(self, call: Stream) -> Ended:
        async for data in call:
            self._heard += 1
            for event in decode_link_events(data):
                match event:
                    case Ping():
                        continue
                    case Attached():
                        self._held, self._member.url = True, reached(event.url, self.address)
                    case Ended():
                        return event
                    case _:
                        self._ready |= isinstance(event, Ready)
                        self._fleet.take(event, self._member)
        return Ended(EngineFailed.code, "the server has ended the stream")


def reached(url: str, address: str) -> str:
    """Return a server's URL with the host by which it was reached, if it listens on all.
    `ContentRefused` if it is not an address that other replicas may get as a source.
    """
    host = address.rpartition(":")[0]
    url = url.replace("://0.0.0.0:", f"://{host}:").replace("://[::]:", f"://{host}:")
    return sources_of(url)[0]
