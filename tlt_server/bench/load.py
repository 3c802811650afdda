"""Load for a server, light enough not to be the bottleneck: raw HTTP/1.1 over reused connections.

`closed_loop` keeps a number of requests open; `open_loop` sends at random moments (Poisson), even
when the server is late. Every request gives one `Answer`. At the end of the file are the fields of
completions and metrics that benches read.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tlt_client import Client
from tlt_server.errors import StartupError

ANSWER_S = 120.0
IDLE_S = 2.0  # a connection is not used again after this long; the server may be about to close it
CLOSED = "the server closed the connection"


class TimedChunk(NamedTuple):
    at_s: float  # time.perf_counter() when all of it was here
    data: bytes


class Answer(NamedTuple):
    due_s: float  # time.perf_counter() at which it was to be sent
    sent_s: float
    ended_s: float  # all of the answer is here
    status: int  # 0: there was no answer
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    chunks: tuple[TimedChunk, ...] = ()  # empty for a body with a length

    @property
    def seconds(self) -> float:
        return self.ended_s - self.sent_s


class RawReply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: tuple[TimedChunk, ...]


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time; the methods `on_...` are its parser's."""

    transport: asyncio.Transport
    idle_since_s = 0.0

    def __init__(self) -> None:
        self._reply: asyncio.Future[RawReply] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._chunks: list[TimedChunk] = []
        self._read = 0  # parts of the body that chunks hold

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    async def exchange(self, request: bytes) -> RawReply:
        """Send a request; return its reply. `ConnectionError`: the server closed."""
        self._begin()
        self._reply = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            raise ConnectionError(CLOSED)
        self.transport.write(request)
        reply = await self._reply
        self.idle_since_s = time.perf_counter()
        if self._headers.get("connection", "").lower() == "close":
            self.transport.close()
        return reply

    def data_received(self, data: bytes) -> None:
        self._at_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(ConnectionError(repr(error)))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_chunk_complete(self) -> None:
        if chunk := b"".join(self._body[self._read :]):
            self._chunks.append(TimedChunk(self._at_s, chunk))
            self._read = len(self._body)

    def on_message_complete(self) -> None:
        if self._reply is not None and not self._reply.done():
            status, body = self._parser.get_status_code(), b"".join(self._body)
            self._reply.set_result(RawReply(status, self._headers, body, tuple(self._chunks)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or ConnectionError(CLOSED))


class Connections:
    """Connections to one server, as many as there are open requests."""

    def __init__(self, url: str, answer_s: float = ANSWER_S, key: str = "") -> None:
        """`answer_s`: time after which a request without an answer fails. `key`: of the requests
        that have none of their own.
        """
        address = urlsplit(url)
        self._answer_s, self._key = answer_s, key
        self._tls = address.scheme == "https"
        self._host = address.hostname or "127.0.0.1"
        self._port = address.port or (443 if self._tls else 80)
        self._header = address.netloc.rpartition("@")[2].encode()
        self._free: list[Connection] = []  # the newest last

    async def open(self, count: int) -> None:
        """Open connections in advance of their requests."""
        self._free += [await self._opened() for _ in range(count)]

    async def post(self, path: str, body: bytes, due_s: float, key: str = "") -> Answer:
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._answer_s):
                reply = await self.send(path, body, key)
        except (OSError, TimeoutError) as error:
            reply = RawReply(0, {}, repr(error).encode(), ())
        return Answer(due_s, sent_s, time.perf_counter(), *reply)

    async def asked(self, path: str, body: bytes) -> Answer:
        """Return an answer of status 200, or raise `StartupError`."""
        answer = await self.post(path, body, time.perf_counter())
        if answer.status != 200:
            raise StartupError(f"{path} answers {answer.status}: {answer.body[:300]!r}")
        return answer

    async def send(self, path: str, body: bytes, key: str = "") -> RawReply:
        self._close_idle()
        key = key or self._key
        bearer = f"authorization: Bearer {key}\r\n".encode() if key else b""
        request = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b"
        connection = self._free.pop() if self._free else await self._opened()
        try:
            reply = await connection.exchange(
                request % (path.encode(), self._header, bearer, len(body), body)
            )
        except BaseException:
            connection.transport.close()
            raise
        if not connection.transport.is_closing():
            self._free.append(connection)
        return reply

    async def _opened(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=self._tls or None
        )
        connection.idle_since_s = time.perf_counter()
        return connection

    def _close_idle(self) -> None:
        oldest_s = time.perf_counter() - IDLE_S
        while self._free and self._free[0].idle_since_s < oldest_s:
            self._free.pop(0).transport.close()

    def close(self) -> None:
        for connection in self._free:
            connection.transport.close()


Ask = Callable[[float], Awaitable[Answer]]  # send the next request; the argument is when it was due


async def closed_loop(ask: Ask, concurrency: int, seconds: float) -> list[Answer]:
    """Keep `concurrency` requests open, each followed by the next; none starts after `seconds`."""
    end_s = time.perf_counter() + seconds

    async def one() -> list[Answer]:
        answers = []
        while (now_s := time.perf_counter()) < end_s:
            answers.append(await ask(now_s))
        return answers

    return [
        answer
        for answers in await asyncio.gather(*(one() for _ in range(concurrency)))
        for answer in answers
    ]


async def open_loop(ask: Ask, per_s: float, seconds: float, seed: int) -> list[Answer]:
    """Send `per_s` requests per second on average for `seconds`, at moments that the seed
    determines; wait for all answers.
    """
    return await sent_at(ask, arrivals(per_s, seconds, seed))


async def sent_at(ask: Ask, moments_s: Iterable[float]) -> list[Answer]:
    """Send a request at each moment after now, and wait for all answers."""
    started_s = time.perf_counter()
    waiting = []
    for moment_s in moments_s:
        await asyncio.sleep(started_s + moment_s - time.perf_counter())
        waiting.append(asyncio.ensure_future(ask(started_s + moment_s)))
    return await asyncio.gather(*waiting)


def arrivals(per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the moments below `seconds` at which requests arrive, by a Poisson process."""
    return itertools.takewhile(lambda moment_s: moment_s < seconds, poisson(per_s, seed))


def poisson(per_s: float, seed: int) -> Iterator[float]:
    draw = random.Random(seed)
    return itertools.accumulate(draw.expovariate(per_s) for _ in itertools.count())


def samples(client: Client) -> Iterator[Sample]:
    """Yield the samples of a server's metrics."""
    for family in text_string_to_metric_families(client.metrics()):
        yield from family.samples


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class CompletionPart(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def completion(content: bytes) -> CompletionPart:
    return msgspec.json.decode(content, type=CompletionPart)


def events(content: bytes) -> Iterator[CompletionPart]:
    """Yield the events of a stream, or of a part of it, without its end."""
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            yield completion(line.removeprefix(b"data: "))
