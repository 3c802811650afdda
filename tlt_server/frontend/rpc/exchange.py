"""One HTTP operation of a gRPC call, run by the application that also answers HTTP.

The application receives and sends gRPC's messages. A message is read when the application requests
the body, so keys and limits are checked first, and in its key's turn (`MessageReads`). A client has
disconnected if it cancels, if its deadline passes, or if it leaves a message unread for
`send_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import msgspec
from starlette.types import ASGIApp, Message, Scope

from tlt_server.errors import Cancelled, TltError, Unavailable
from tlt_server.frontend.http.arrival import ARRIVE
from tlt_server.frontend.http.auth import key_of
from tlt_server.frontend.http.connections import REPLIED
from tlt_server.frontend.http.replies import REFUSED, TAKE_CONTENT
from tlt_server.frontend.http.slices import Turn
from tlt_server.frontend.rpc.messages import fill, wired
from tlt_server.frontend.rpc.methods import Operation, RpcMethod

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
    """The operation that one message of a call requests."""

    def __init__(
        self,
        context: Context,
        method: RpcMethod,
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
        self._gives = method.gives
        self._state: dict[str, Any] = {
            ARRIVE: method.arrive,
            REPLIED: contextlib.ExitStack(),
            TAKE_CONTENT: self.take_content,
        }
        self._scope = _scope(context, method.operation, self._state, secure)
        self.metadata: list[tuple[str, str]] = []  # metadata of the reply

    async def run(self, app: ASGIApp) -> None:
        """Run the application until it has answered.

        If this is cancelled, the application sees a disconnected client, and this waits for its
        end.
        """
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
        """Release the request's place."""
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
        """Send a large reply or, with its name, a large event; its message is made in slices."""
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
        """Return the message of a server-sent event: the event's name is the field to set."""
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


T = TypeVar("T")
OTHERS_S = 1.0  # time that a read may take while another key waits
OWN_S = 5.0  # the same while only its own key does
CHECK_S = 0.25


class _Read(NamedTuple):
    owner: str
    wait: asyncio.Timeout
    began_s: float


class MessageReads:
    def __init__(self, at_once: int) -> None:
        self._free = self.at_once = at_once
        self._reads: list[_Read] = []  # the longest first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, no empty queue
        self._check: asyncio.TimerHandle | None = None

    async def read(self, owner: str, receive: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `receive`, after waiting for a turn. `Unavailable` if it took too
        long while others waited.
        """
        await self._turn(owner)
        loop, read = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(None) as wait:
                read = _Read(owner, wait, loop.time())
                self._reads.append(read)
                return await receive()
        except TimeoutError:
            raise Unavailable(
                f"{self.at_once} messages are read at once (max_bodies_mb) and others wait, but "
                "this one did not arrive; send it later, or fewer at once",
                retry_after_s=1,
            ) from None
        finally:
            if read is not None:
                self._reads.remove(read)
            self._give_turn()

    async def _turn(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        if self._check is None:
            self._look_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(owner, turn)
            else:
                self._give_turn()
            raise

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Stop waiting, so that no read is cut for a caller that has left."""
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _give_turn(self) -> None:
        """Pass a turn to the owner with the fewest reads, or keep it free."""
        reading = self._reading()
        while self._waiting:
            owner = min(self._waiting, key=lambda owner: reading[owner])
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.done():  # else its caller has left
                turn.set_result(None)
                return
        self._free += 1

    def _look_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self._look)

    def _look(self) -> None:
        """Cut the longest read of the key with the most reads, if it is overdue."""
        self._check = None
        if not self._waiting or not self._reads:
            return
        [(most, _)] = self._reading().most_common(1)
        longest = next(read for read in self._reads if read.owner == most)
        allowed_s = OTHERS_S if self._waiting.keys() - {most} else OWN_S
        overdue = asyncio.get_running_loop().time() - longest.began_s >= allowed_s
        if overdue and not longest.wait.expired():
            longest.wait.reschedule(0.0)
        self._look_later()

    def _reading(self) -> Counter[str]:
        return Counter(read.owner for read in self._reads)
