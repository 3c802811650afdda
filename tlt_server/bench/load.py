"""Load for a server, light enough not to be the bottleneck: raw HTTP/1.1 over connections that are
kept and used again.

`closed_loop` keeps a number of requests open; `open_loop` sends at random moments (Poisson), even
when the server is late. Every request sent gives one `Answer`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

ANSWER_S = 120.0
IDLE_S = 2.0  # a connection is not used again after this long; the server may be about to close it


class TimedChunk(NamedTuple):
    at_s: float  # time.perf_counter() when all of it was here
    data: bytes


class Answer(NamedTuple):
    due_s: float  # time.perf_counter() at which it was to be sent
    sent_s: float
    ended_s: float  # all of the answer is here
    status: int  # 0: there was no answer
    headers: bytes  # as they came, in lower case
    body: bytes
    chunks: tuple[TimedChunk, ...] = ()  # empty for a body with a length

    @property
    def seconds(self) -> float:
        return self.ended_s - self.sent_s

    def header(self, name: str) -> str:
        values = [
            line.partition(b":")[2]
            for line in self.headers.split(b"\r\n")
            if line.startswith(name.encode() + b":")
        ]
        return values[0].strip().decode() if values else ""


class Connections:
    """Connections to one server; as many as there are requests open at once."""

    def __init__(self, url: str, answer_s: float = ANSWER_S) -> None:
        """A request without an answer after `answer_s` is broken."""
        address = urlsplit(url)
        self._answer_s = answer_s
        self._tls = address.scheme == "https"
        self._host = address.hostname or "127.0.0.1"
        self._port = address.port or (443 if self._tls else 80)
        self._header = address.netloc.rpartition("@")[2].encode()
        self._free: list[
            tuple[float, asyncio.StreamReader, asyncio.StreamWriter]
        ] = []  # since when, the newest last

    async def post(self, path: str, body: bytes, due_s: float, key: str = "") -> Answer:
        sent_s = time.perf_counter()
        chunks: list[TimedChunk] = []
        try:
            async with asyncio.timeout(self._answer_s):
                status, headers, content = await self._exchange(path, body, key, chunks)
        except (OSError, EOFError, TimeoutError) as error:
            status, headers, content = 0, b"", repr(error).encode()
        return Answer(due_s, sent_s, time.perf_counter(), status, headers, content, tuple(chunks))

    async def _exchange(
        self, path: str, body: bytes, key: str, chunks: list[TimedChunk]
    ) -> tuple[int, bytes, bytes]:
        self._close_idle()
        bearer = f"authorization: Bearer {key}\r\n".encode() if key else b""
        _, reader, writer = (
            self._free.pop()
            if self._free
            else (
                0.0,
                *await asyncio.open_connection(self._host, self._port, ssl=self._tls or None),
            )
        )
        try:
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b"
                % (path.encode(), self._header, bearer, len(body), body)
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"transfer-encoding: chunked" in head:
                await _read_chunks(reader, chunks)
                content = b"".join(chunk.data for chunk in chunks)
            else:
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                content = await reader.readexactly(length)
        except BaseException:
            writer.close()
            raise
        if b"connection: close" in head:
            writer.close()
        else:
            self._free.append((time.perf_counter(), reader, writer))
        return int(head[9:12]), head, content

    def _close_idle(self) -> None:
        oldest_s = time.perf_counter() - IDLE_S
        while self._free and self._free[0][0] < oldest_s:
            self._free.pop(0)[2].close()

    def close(self) -> None:
        for _, _, writer in self._free:
            writer.close()


async def _read_chunks(reader: asyncio.StreamReader, chunks: list[TimedChunk]) -> None:
    """Read a body that comes in chunks, each after its size in hexadecimal digits."""
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size)
        chunks.append(TimedChunk(time.perf_counter(), data))
        await reader.readexactly(2)
    await reader.readexactly(2)


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
    """`per_s` requests per second on average for `seconds`, at moments that the seed gives; waits
    for all answers.
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
