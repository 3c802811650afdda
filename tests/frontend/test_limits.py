"""Nothing is unbounded: bodies, headers, slow clients, the queue, time; and a client that leaves
takes its sequences with it.
"""

import contextlib
import itertools
import json
import select
import socket
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server, serving
from tests.waiting import until
from tlt_client import Client
from tlt_client.wire import Token
from tlt_server.errors import TltError
from tlt_server.frontend.http import limits
from tlt_server.frontend.http import limits as limits_module
from tlt_server.frontend.http.limits import BodyBudget

LONG = {"requests": [{"token_ids": [HANGS]}]}


server = serving(
    max_body_mb=1,
    body_timeout_s=2.0,
    header_timeout_s=2.0,
    send_timeout_s=2.0,
    max_header_kb=4,
    max_queue=10,
)


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(path: str = "/generate", **headers: object) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def test_a_100_mb_body_is_refused_before_it_is_read(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(head(content_length=100 * 2**20) + b"x" * 1000)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 413") and b"1048576 bytes" in reply
    assert b"connection: close" in reply.lower()


def test_a_body_without_length_is_cut_at_the_limit(server: LiveServer) -> None:
    sent = 0
    with connect(server) as connection:
        connection.sendall(head(transfer_encoding="chunked"))
        try:
            while sent < 100 * 2**20:
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        except OSError:
            pass
        reply = read_all(connection)
    assert sent < 20 * 2**20  # twice the limit of 1 MiB and what sockets buffer
    assert reply.startswith(b"HTTP/1.1 413") or reply == b""  # a reset may overtake the reply


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/nothing", "/livez"])
@pytest.mark.parametrize("chunked", [True, False])
def test_client_sending_its_whole_body_first_gets_its_refusal(
    server: LiveServer, path: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DISCARD_S", 50.0)
    size = 2**21 - 2**12  # over the limit, and not twice as much
    with connect(server) as connection:
        # With a small buffer the client must wait until the server takes the whole body.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        if chunked:
            connection.sendall(
                head(path, transfer_encoding="chunked")
                + b"%x\r\n" % size
                + b"x" * size
                + b"\r\n0\r\n\r\n"
            )
        else:
            connection.sendall(head(path, content_length=size) + b"x" * size)
        started = time.monotonic()
        reply = read_all(connection)
    status = (
        413
        if not chunked or path not in ("/nothing", "/livez")
        else 404
        if path == "/nothing"
        else 405
    )
    assert reply.startswith(b"HTTP/1.1 %d" % status) and reply.endswith(b"}")
    assert b"connection: close" in reply.lower()
    assert time.monotonic() - started < 20, "what had all arrived is thrown away without waiting"


def test_unfinished_body_is_cut_soon_after_the_reply(server: LiveServer) -> None:
    started = time.monotonic()
    with connect(server) as connection:
        connection.sendall(head("/nothing", content_length=1000) + b"x")
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 404") and 0.9 < time.monotonic() - started < 20


def test_a_slow_body_meets_its_deadline(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(head(content_length=100) + b"{")
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 408") and b"request_timeout" in reply
    assert b"body_timeout_s" in reply
    assert b"connection: close" in reply.lower()


def test_slow_and_large_headers_end_the_connection(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\n")
        assert read_all(connection) == b""
    with connect(server) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nx: " + b"y" * 5000)
        assert b"max_header_kb" in read_all(connection)


@pytest.mark.parametrize(
    "framing",
    [
        b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 10_000,
        b"2\r\n{}\r\n0\r\nx: " + b"y" * 50_000,
        b"2;" + b"y" * 50_000,
        b"1\r\n{\r\n" * 10_000,
    ],
    ids=["trailers", "a long trailer", "a long extension", "tiny chunks"],
)
def test_framing_of_a_body_is_bounded(server: LiveServer, framing: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(head("/tokenize", transfer_encoding="chunked") + framing)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 400") and b"max_header_kb" in reply


def test_connection_accepts_consecutive_large_bodies(server: LiveServer) -> None:
    body = b'{"requests": [{"prompt": "a"}]' + b" " * 200_000 + b"}"
    with httpx.Client(base_url=server.url) as client:
        assert [client.post("/generate", content=body).status_code for _ in range(3)] == [200] * 3


def test_small_chunks_and_trailers_are_taken(server: LiveServer) -> None:
    body = json.dumps({"prompt": "a" * 400}).encode()
    chunks = b"".join(b"8\r\n" + body[at : at + 8] + b"\r\n" for at in range(0, len(body) - 7, 8))
    rest = body[len(body) // 8 * 8 :]
    last = b"%x\r\n%s\r\n" % (len(rest), rest) if rest else b""
    with connect(server) as connection:
        connection.sendall(
            head("/tokenize", transfer_encoding="chunked", connection="close")
            + chunks
            + last
            + b"0\r\nhost: evil\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_a_departed_client_aborts_its_sequences(server: LiveServer, stream: bool) -> None:
    before = len(server.engine.aborted)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(timeout=httpx.Timeout(30, read=1.0)) as client,
    ):
        response = client.send(
            client.build_request("POST", f"{server.url}/generate", json=LONG | {"stream": stream}),
            stream=stream,
        )
        response.read()
    until(lambda: len(server.engine.aborted) > before)
    until(lambda: len(server.client) == 0 and not server.engine.running)


def hanging(stream: bool) -> bytes:
    body = json.dumps(LONG | {"stream": stream}).encode()
    return head(content_length=len(body)) + body


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_departed_pipelining_client_aborts_its_sequences(
    server: LiveServer, stream: bool, apart: bool
) -> None:
    with connect(server) as connection:
        connection.sendall(hanging(stream) + (b"" if apart else hanging(stream)))
        until(lambda: len(server.client) == 1)
        if apart:
            connection.sendall(hanging(stream)[:40])
            connection.sendall(hanging(stream)[40:] * 3)
        time.sleep(0.1)
    until(lambda: len(server.client) == 0 and not server.engine.running)


@pytest.mark.parametrize(
    "rest",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x00 no HTTP \xff" * 100,
        b"x" * 1_000_000,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_after_a_completed_request_are_dropped(
    server: LiveServer, stream: bool, rest: bytes
) -> None:
    body = json.dumps(
        {"requests": [{"prompt": "abc"}], "sampling": {"max_tokens": 100}, "stream": stream}
    ).encode()
    with connect(server) as connection:
        connection.sendall(head(content_length=len(body)) + body + rest)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1") == 1
    assert b"connection: close" in reply.lower() and b'"usage"' in reply


def test_requests_one_after_the_other_share_a_connection(server: LiveServer) -> None:
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    sockets = set()
    for _ in range(3):
        connection.request("GET", "/livez")
        reply = connection.getresponse()
        assert reply.status == 200 and reply.read()
        sockets.add(connection.sock)
    connection.close()
    assert len(sockets) == 1 and None not in sockets


def test_reply_to_a_head_request_closes_the_connection(server: LiveServer) -> None:
    for path in ("/livez", "/events", "/none"):
        reply = httpx.head(f"{server.url}{path}")
        assert reply.headers["connection"] == "close"


def test_closing_a_stream_midway_aborts_its_sequences(server: LiveServer) -> None:
    before = len(server.engine.aborted)
    with Client(server.url, timeout_s=30) as client:
        events = client.stream(
            [{"prompt": "abc"}, {"token_ids": [HANGS]}], sampling={"max_tokens": 50}
        )
        assert isinstance(next(events), Token)
        events.close()
    until(lambda: len(server.engine.aborted) > before and len(server.client) == 0)


def test_client_that_stops_reading_is_cut_off(model: Path) -> None:
    fast = {"per_step": 100, "step_s": 0.0}
    with (
        live_server(model, send_timeout_s=0.3, engine=fast) as server,
        connect(server) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = (
            b'{"requests": ['
            + b",".join([b'{"prompt": "abc", "n": 100}'] * 10 + [b'{"token_ids": [%d]}' % HANGS])
            + b'], "sampling": {"max_tokens": 400}, "stream": true}'
        )
        connection.sendall(head(content_length=len(body)) + body)
        until(lambda: len(server.client) > 0)
        until(lambda: len(server.client) == 0)
        until(lambda: server.engine.aborted)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "10.0.0.1"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil@localhost"}, 403),
        ({"host": "[::1]evil"}, 403),
        ({"host": "localhost/evil"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost:80", "origin": "http://LOCALHOST"}, 200),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8001"}, 403),
        ({"host": "localhost:8000", "origin": "http://127.0.0.1:8000"}, 403),
        ({"host": "localhost:8000", "origin": "app://localhost:8000"}, 403),
        ({"host": "localhost:8000", "origin": "http://evil@localhost:8000"}, 403),
        ({"host": "[::1]", "origin": "http://[::1]evil"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "anything"}, 403),
    ],
)
def test_an_open_server_answers_to_its_own_machine_only(
    server: LiveServer, headers: dict[str, str], status: int
) -> None:
    body = {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}}
    assert httpx.post(f"{server.url}/generate", json=body, headers=headers).status_code == status
    assert httpx.get(f"{server.url}/livez", headers={"host": "probe.example"}).status_code == 200


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (b"GET /livez HTTP/1.1\r\n\r\n", 400, b"0 headers Host"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400, b"2 headers"),
        (b"GET /livez HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400, b"2 headers Host"),
        (b"GET http://other/livez HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b"or a URL of the"),
        (b"GET http://a@localhost/livez HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b"or a URL"),
        (b"GET ftp://localhost/livez HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b"or a URL"),
        (b"GET http:///livez HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b""),
        (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b"'*'; it must be a path"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, b"it must be a path"),
        (b"GET /livez\r\n\r\n", 505, b"HTTP/0.9; send HTTP/1.1"),
        (b"GET /livez HTTP/0.9\r\nhost: localhost\r\n\r\n", 505, b"send HTTP/1.1"),
        (b"GET /livez HTTP/1.2\r\nhost: localhost\r\n\r\n", 505, b"send HTTP/1.1"),
        (b"GET /livez HTTP/2.0\r\nhost: localhost\r\n\r\n", 505, b"send HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, b"send HTTP/1.1"),
        (head(content_length=2, content_encoding="gzip") + b"{}", 415, b"'gzip'; send the body as"),
        (head(content_length=2, content_encoding="identity, br") + b"{}", 415, b"Content-Encoding"),
        (head(x="y" * 5000), 400, b"4096 bytes (max_header_kb)"),
        (head(**{f"x{number}": "" for number in range(700)}), 400, b"max_header_kb"),
        (head("/" + "x" * 5000), 400, b"max_header_kb"),
        (head(content_length="-5"), 400, b"check its"),
        (head(content_length="9" * 30), 400, b"check its"),
        (head(transfer_encoding="gzip"), 400, b"check its"),
        (head(transfer_encoding="chunked") + b"zz\r\n", 400, b"check its"),
        (b"GET /caf\xe9 HTTP/1.1\r\n\r\n", 400, b"check its"),
        (b"no HTTP\r\n\r\n", 400, b"check its"),
    ],
)
def test_unreadable_or_ambiguous_requests_are_refused(
    server: LiveServer, request_: bytes, status: int, says: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(request_)
        reply, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in reply.lower()
    assert b"application/json" in reply
    assert says in body and json.loads(body)["error"]["code"] == "invalid_request"


def test_excess_bytes_during_a_request_close_the_connection(server: LiveServer) -> None:
    sent = 0
    with connect(server) as connection:
        connection.sendall(hanging(True))
        until(lambda: len(server.client) == 1)
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            while sent < 100 * 2**20:
                connection.sendall(b"x" * 65536)
                sent += 65536
    assert sent < 20 * 2**20  # the limit of 1 MiB and what sockets buffer
    until(lambda: len(server.client) == 0 and not server.engine.running)


def unfinished(server: LiveServer, stack: contextlib.ExitStack, key: str = "") -> socket.socket:
    """Send a body of 900 kB without its last byte."""
    connection = stack.enter_context(connect(server))
    keyed = {"authorization": f"Bearer {key}"} if key else {}
    connection.sendall(head(content_length=900_000, **keyed) + b" " * 899_999)
    return connection


def test_bodies_in_transfer_are_bounded_and_stalled_ones_dropped(model: Path) -> None:
    with (
        live_server(model, max_body_mb=1, max_bodies_mb=2) as server,
        contextlib.ExitStack() as stack,
        Client(server.url, timeout_s=30) as client,
    ):
        bodies = [unfinished(server, stack) for _ in range(5)]
        for reply in refusals(bodies, 3):
            assert b"retry-after: 1" in reply
            assert b"2097152 bytes, the limit (max_bodies_mb)" in reply
        assert client.generate([{"prompt": "ab"}], sampling={"max_tokens": 1}).results[0].choices
        for connection in bodies:
            connection.sendall(b"x")
            assert read_until_body(connection).startswith(b"HTTP/1.1 400")  # it was all read


def refusals(connections: list[socket.socket], count: int) -> list[bytes]:
    """Wait for this number of replies, all 503, and return them without their connections."""
    until(lambda: len(select.select(connections, [], [], 0)[0]) == count)
    replies = []
    for connection in select.select(connections, [], [], 0)[0]:
        connections.remove(connection)
        replies.append(read_all(connection))
    assert all(reply.startswith(b"HTTP/1.1 503") for reply in replies)
    return replies


def read_until_body(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    return received


def test_bodies_of_one_key_leave_room_for_a_second_key(model: Path) -> None:
    keys = "greedy-key name=greedy\nsmall-key name=small\n"
    with (
        live_server(model, max_body_mb=1, max_bodies_mb=2, keys=keys) as server,
        contextlib.ExitStack() as stack,
    ):
        small = unfinished(server, stack, "small-key")
        greedy = [unfinished(server, stack, "greedy-key") for _ in range(4)]
        refusals(greedy, 3)
        small.sendall(b"x")
        assert read_until_body(small).startswith(b"HTTP/1.1 400")


class Body:
    def __init__(self) -> None:
        self.was_cut = False

    def cut(self, error: TltError) -> None:
        self.was_cut = True


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(-2, 60)), max_size=60)
)
def test_bodies_never_hold_more_than_their_budget(arrivals: list[tuple[str, int, int]]) -> None:
    """The size -1 stands for the end of a body, -2 for a request that needs a place."""
    seconds = itertools.count()
    budget = BodyBudget(100, clock=lambda: float(next(seconds)))
    bodies = {(owner, i): Body() for owner in "abc" for i in range(4)}
    for owner, number, size in arrivals:
        body = bodies[owner, number]
        if size == -2:
            budget.make_place()
        elif size == -1 or body.was_cut:
            budget.release(owner, body)
            bodies[owner, number] = Body()
        else:
            budget.take(owner, body, size)
        budget.check()
    for (owner, _), body in bodies.items():
        budget.release(owner, body)
    assert budget.bytes == 0 and not budget.make_place()


def test_stalled_body_of_the_largest_owner_is_dropped_first() -> None:
    now_s = 0.0
    budget, bodies = BodyBudget(100, clock=lambda: now_s), [Body() for _ in range(3)]
    for owner, body in zip("abb", bodies, strict=True):
        budget.take(owner, body, 10)
    assert not budget.make_place()
    now_s = 2.0
    budget.take("b", bodies[1], 10)
    assert not budget.make_place("c")
    assert budget.make_place() and [body.was_cut for body in bodies] == [False, False, True]
    assert budget.make_place("a") and bodies[0].was_cut


def test_stalled_bodies_make_room_for_new_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "STALLED_S", 0.2)
    with live_server(model, max_connections=4) as server, contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(connect(server)) for _ in range(4)]
        for connection in stalled:
            connection.sendall(head(content_length=10) + b"{")
        until(lambda: httpx.get(f"{server.url}/server_info").status_code == 200)
        [reply] = refusals(stalled, 1)
        assert b"max_connections" in reply and b"slowest of the key" in reply


@pytest.mark.parametrize(
    ("line", "rest", "status"),
    [
        (b"GET /livez HTTP/1.0", b"", 200),
        (b"GET /livez HTTP/1.1", b"host:\r\n", 200),
        (b"GET /livez HTTP/1.0", b"host: a\r\ncontent-encoding: identity\r\n", 200),
        (b"GET /livez HTTP/1.1", b"host: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n", 200),
        (b"GET http://localhost/livez HTTP/1.1", b"host: localhost\r\n", 200),
        (b"GET HTTP://LOCALHOST:81/weights?x=1 HTTP/1.1", b"host: localhost:81\r\n", 200),
        (b"GET https://[::1]:8000/weights HTTP/1.1", b"host: [::1]:8000\r\n", 200),
        (b"GET http://localhost/weights HTTP/1.0", b"", 200),
        (b"GET http://localhost HTTP/1.1", b"host: localhost\r\n", 200),
        (b"GET http://localhost?x=1 HTTP/1.1", b"host: localhost\r\n", 200),
        (b"GET http://localhost/no HTTP/1.1", b"host: localhost\r\n", 404),
        (b"GET http://other.example/weights HTTP/1.1", b"host: other.example\r\n", 403),
        (b"GET http://other.example/weights HTTP/1.0", b"", 403),
    ],
)
def test_unambiguous_requests_are_answered(
    server: LiveServer, line: bytes, rest: bytes, status: int
) -> None:
    with connect(server) as connection:
        connection.sendall(line + b"\r\n" + rest + b"connection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 %d " % status)
