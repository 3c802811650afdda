"""Replies and figures of `tlt bench load`."""

import pytest

from tlt_server.bench.clients import LoadRow, Sent, figures, read_reply
from tlt_server.errors import StartupError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
WHOLE = (
    b'{"choices":[{"index":1,"text":"b"},{"index":0,"text":"a"}],"usage":{"completion_tokens":4}}'
)
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a "}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"text"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
)


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + body


def test_whole_and_streamed_replies_are_read_alike() -> None:
    assert read_reply(HEAD + b"content-length: 91\r\n\r\n" + WHOLE) == (4, ["a", "b"])
    assert read_reply(chunked(WHOLE[:40], WHOLE[40:])) == (4, ["a", "b"])
    assert read_reply(chunked(*EVENTS)) == (3, ["a text"])


def test_refused_request_is_an_error_with_its_reply() -> None:
    with pytest.raises(StartupError, match="queue_full"):
        read_reply(b'HTTP/1.1 429 \r\n\r\n{"error":{"code":"queue_full"}}')


def test_ways_are_compared_round_by_round_with_the_batch() -> None:
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
