"""Replies and figures of `tlt bench load`."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tlt_server.bench.clients import LoadRow, Sent, figures, read_completion
from tlt_server.bench.load import Connection, Connections, RawReply, TimedChunk
from tlt_server.errors import StartupError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = (
    b'{"choices":[{"index":1,"text":"b"},{"index":0,"text":"a"}],"usage":{"completion_tokens":4}}'
)
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a "}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"text"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
)
SIZED = HEAD + b"content-length: %d\r\n\r\n" % len(WHOLE) + WHOLE


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body


def received(parts: Sequence[bytes]) -> list[RawReply]:
    """Send two requests over one connection to a server that answers each in these parts; return
    both replies.
    """
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for _ in range(2):
            await reader.readuntil(b"{}")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        await reader.read()
        writer.close()

    async def send() -> list[RawReply]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}", 60)
            await connections.open(1)
            replies = [await connections.send("/v1/completions", b"{}") for _ in range(2)]
            connections.close()
            return replies

    replies = asyncio.run(send())
    assert opened == 1
    return replies


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (SIZED, (4, ["a", "b"])),
        (chunked(WHOLE[:40], WHOLE[40:]), (4, ["a", "b"])),
        (chunked(*EVENTS), (3, ["a text"])),
    ],
    ids=["sized", "in chunks", "streamed"],
)
@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_replies_are_read_alike_in_parts_of_any_size(
    reply: bytes, expected: tuple[int, list[str]], size: int
) -> None:
    for found in received([reply[at : at + size] for at in range(0, len(reply), size)]):
        assert read_completion(found) == expected


class OpenLine(asyncio.Transport):
    """A connection to a server that says nothing."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        """Send nothing."""


def test_chunks_are_timed_by_their_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = chunked(b"one", b"two")
    cut = raw.index(b"tw") + 1
    clock = SimpleNamespace(perf_counter=iter((1.0, 2.0, 3.0)).__next__)
    monkeypatch.setattr("tlt_server.bench.load.time", clock)

    async def read() -> RawReply:
        connection = Connection()
        connection.connection_made(OpenLine())
        reply = asyncio.ensure_future(connection.exchange(b""))
        await asyncio.sleep(0)
        connection.data_received(raw[:cut])
        connection.data_received(raw[cut:])
        return await reply

    reply = asyncio.run(read())
    assert reply.chunks == (TimedChunk(1.0, b"one"), TimedChunk(2.0, b"two"))
    assert (reply.status, reply.body) == (200, b"onetwo")


def test_refused_bench_request_raises_with_its_reply() -> None:
    refused = b'HTTP/1.1 429 \r\ncontent-length: 31\r\n\r\n{"error":{"code":"queue_full"}}'
    with pytest.raises(StartupError, match="queue_full"):
        read_completion(received([refused])[0])


def test_request_forms_are_compared_with_the_batch_each_round() -> None:
    texts = ["a", "b"]
    found = figures(
        {
            LoadRow("off", "batch", None): [
                Sent(1.0, 100, 0.001, texts),
                Sent(2.0, 100, 0.001, texts),
            ],
            LoadRow("off", "whole", None): [
                Sent(1.0, 100, 0.002, texts),
                Sent(4.0, 100, 0.004, ["a", "c"]),
            ],
            LoadRow("off", "batch", 0): [Sent(4.0, 100, 0.001, texts)] * 2,
            LoadRow("off", "whole", 0): [Sent(4.0, 100, 0.001, texts)] * 2,
        }
    )
    batch, whole, *with_logprobs = found["rows"]
    assert batch["of_batch"] == 1 and batch["clients"] == 1
    assert whole["of_batch"] == 0.75 and whole["clients"] == 2
    assert whole["tokens_per_s"] == 62 and whole["frontend_us_per_token"] == 30.0
    assert [row["of_batch"] for row in with_logprobs] == [1, 1]
    assert found["texts_differing"] == 1
