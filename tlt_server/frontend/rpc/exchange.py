"""One HTTP operation of a gRPC call, run by the application that also answers HTTP.

The application receives and sends gRPC's messages. A message is read when the application asks for
the body, so keys and limits are checked first. A client has disconnected if it cancels, if its
deadline passes, or if it leaves a message unread for `send_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import Message as Protobuf
from starlette.types import ASGIApp, Message, Scope

from tlt_server.errors import Cancelled, TltError
from tlt_server.frontend.http.arrival import ARRIVE
from tlt_server.frontend.http.auth import key_of
from tlt_server.frontend.http.loop_share import Turn
from tlt_server.frontend.http.places import REPLIED
from tlt_server.frontend.http.replies import REFUSED, TAKE_CONTENT
from tlt_server.frontend.rpc.messages import fill, wired
from tlt_server.frontend.rpc.methods import Operation, RpcMethod
from tlt_server.frontend.rpc.reads import MessageReads

# Metadata of a call that become headers, and headers of a reply that become metadata.
TO_HEADERS = (
    "authorization",
    "idempotency-key",
    "origin",
    "sec-fetch-site",
    "traceparent",
    "tracestate",
    "x-request-id",
)
TO_METADATA = (b"x-request-id", b"x-rollout-id", b"retry-after")
LARGE_BYTES = 2**16  # larger replies are made in a thread
Context: TypeAlias = grpc.aio.ServicerContext


class Exchange:
    """The operation that one message of a call asks for."""

    def __init__(
        self,
        context: Context,
        operation: Operation,
        reads: MessageReads,
        send_timeout_s: float,
        *,
        secure: bool,
    ) -> None:
        self._context, self._reads, self._send_timeout_s = context, reads, send_timeout_s
        self._gone = asyncio.Event()
        self._asked = self._started = self._streams = self._answered = self._unread = False
        self._body = bytearray()
        self._reply = b""  # the message of a large reply
        self._state: dict[str, Any] = {}
        self._scope = _scope(context, operation, self._state, secure)
        self.metadata: list[tuple[str, str]] = []  # metadata of the reply
        self._gives: type[Protobuf]

    async def run(self, app: ASGIApp, method: RpcMethod) -> None:
        """Run the application until it has answered.

        If this is cancelled, the application sees the client leave, and this waits for its end.
        """
        self._gives = method.gives
        self._state |= {
            ARRIVE: method.arrive,
            REPLIED: contextlib.ExitStack(),
            TAKE_CONTENT: self.take_content,
        }
        running = asyncio.ensure_future(app(self._scope, self.receive, self.send))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._gone.set()
            await asyncio.wait({running})
            raise

    @property
    def path(self) -> str:
        """Path of the operation, final once the message was read."""
        path: str = self._scope["path"]
        return path

    @property
    def error(self) -> TltError | None:
        if self._unread:
            return Cancelled(
                f"the client left a message unread for {self._send_timeout_s:g} s "
                "(send_timeout_s); read faster"
            )
        return self._state.get(REFUSED)

    def close(self) -> None:
        """Give the request's place back."""
        replied: contextlib.ExitStack = self._state[REPLIED]
        replied.close()

    async def answer(self) -> None:
        """Send the reply, unless it was streamed."""
        if self._reply:
            await self._write(self._reply)
        elif not self._streams:
            make = self._message
            await self._write(
                await asyncio.to_thread(make, self._body)
                if len(self._body) > LARGE_BYTES
                else make(self._body)
            )

    async def receive(self) -> Message:
        if self._started and REFUSED in self._state:
            return {"type": "http.disconnect"}  # nothing reads the rest
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": await self._next(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _next(self) -> bytes:
        """Return the next message, and an empty one after the last."""
        data = await self._reads.read(key_of(self._scope), self._context.read)
        return data if isinstance(data, bytes) else b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Mapping[bytes, bytes] = dict(message["headers"])
            self._started = True
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self.metadata = [
                (name.decode(), headers[name].decode()) for name in TO_METADATA if name in headers
            ]
        elif self._streams:
            if message.get("body"):
                await self._write(self._event(message["body"]))
        else:
            self._body += message.get("body", b"")

    async def take_content(self, content: Any, turn: Turn, name: str = "") -> None:
        """Take a large reply or, with its name, a large event; its message is made in slices."""
        making = wired(self._gives, {name: content} if name else content)
        while True:
            try:
                size = next(making)
            except StopIteration as made:
                data = b"".join(made.value)
                break
            await turn(size)
        if name:
            await self._write(data)
        else:
            self._reply = data

    async def _write(self, data: bytes) -> None:
        if self._gone.is_set():
            return
        try:
            if not self._answered:
                # This waits for no reader, so it is outside the timeout. If it were cut off
                # halfway, gRPC would send it a second time, and no status could follow.
                self._answered = True
                await self._context.send_initial_metadata(self.metadata)
            async with asyncio.timeout(self._send_timeout_s):
                await self._context.write(data)
        except TimeoutError:
            self._unread = True
            self._gone.set()
        except grpc.aio.InternalError:  # the client has left, and gRPC has not yet cancelled this
            self._gone.set()

    def _message(self, body: bytes | bytearray) -> bytes:
        message = self._gives()
        fill(message, msgspec.json.decode(body))
        return message.SerializeToString()

    def _event(self, frame: bytes) -> bytes:
        """Return the message of a server-sent event, which sets the field of the event's name."""
        name, _, data = frame.removeprefix(b"event: ").partition(b"\ndata: ")
        message = self._gives()
        fill(message, {name.decode(): msgspec.json.decode(data)})
        return message.SerializeToString()


def _scope(context: Context, operation: Operation, state: dict[str, Any], secure: bool) -> Scope:
    metadata = context.invocation_metadata() or ()
    headers = [
        (name.encode(), value.encode() if isinstance(value, str) else value)
        for name, value in metadata
        if name in TO_HEADERS
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "scheme": "https" if secure else "http",
        "method": operation.method,
        "path": operation.path,
        "raw_path": operation.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*headers, (b"transfer-encoding", b"chunked")],  # the length is not known yet
        "client": _address(context.peer()),
        "server": None,
        "state": state,
    }


def _address(peer: str) -> tuple[str, int] | None:
    """Parse a peer of gRPC, such as `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None
