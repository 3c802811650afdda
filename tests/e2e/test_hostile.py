"""Hundreds of hostile requests at a real server: each is answered as it should be, and the
server is afterwards as it was before.

Requests are made by `hostile_requests` from a seed; a failure names seed and index. Sound requests
run in between, and their results are bit for bit those from before the storm.
"""

import asyncio
import itertools
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.e2e.conftest import PAIR
from tests.e2e.hostile_bodies import SECRET
from tests.e2e.hostile_requests import LIMITS, Attempt, attempt
from tests.processes import engine
from tests.waiting import until
from tlt_client import AsyncClient, Client, ServerError
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess

CONCURRENCY = 24
ANSWER_S = 60.0  # no answer within this time is a hang
PROBE_S = 15.0  # a probe answers within this time under any load
GROWTH_MB = (
    96  # limit for each warm process: slack of allocators, not a leak of some kB per request
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SOUND: list[dict[str, Any]] = [
    {"requests": [{"prompt": "2+2=", "seed": 7, "n": 2}], "sampling": {"max_tokens": 20}},
    {
        "requests": [{"token_ids": [5, 9], "seed": 1}, {"prompt": "3*4+5=", "seed": 2}],
        "sampling": {"max_tokens": 16, "temperature": 0.7},
    },
    {
        "requests": [{"messages": [{"role": "user", "content": "Compute 3*4+5."}], "seed": 3}],
        "sampling": {"max_tokens": 24, "logprobs": 3},
    },
    {
        "requests": [{"prompt": "7*8=", "seed": 4, "sd": False}],
        "sampling": {"max_tokens": 12, "top_p": 0.8, "repetition_penalty": 1.2},
    },
]


class Answer:
    """A reply, read strictly."""

    def __init__(self, received: bytes, *, head_only: bool) -> None:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split(b" ")[1])
        pairs = (line.decode("latin-1").partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.whole, self.body, self.rest = (
            True,
            b"",
            rest,
        )  # without either header there is no body
        if not head_only and "content-length" in self.headers:
            size = int(self.headers["content-length"])
            self.body, self.rest, self.whole = rest[:size], rest[size:], len(rest) >= size
        elif not head_only and self.headers.get("transfer-encoding") == "chunked":
            self.whole, self.rest = self._unchunk(rest)
        self.kind = self.headers.get("content-type", "").partition(";")[0]

    def _unchunk(self, rest: bytes) -> tuple[bool, bytes]:
        """Read the chunks; return whether the last one is there, and what follows it."""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            self.body += rest[:length]
            rest = rest[length + 2 :]
            if not length:
                return True, rest
        return False, b""


async def send(address: tuple[str, int], asked: Attempt) -> bytes:
    """All that came back until the connection's end; a client that leaves early returns nothing."""
    reader, writer = await asyncio.open_connection(*address)
    received = b""
    try:
        for i, piece in enumerate(asked.pieces):
            if i:
                await asyncio.sleep(0.01)
            writer.write(piece)
            await writer.drain()
        if asked.leaving == "half-close":
            writer.write_eof()
        elif asked.leaving == "leave stream":
            await reader.read(200)
            return b""
        elif asked.leaving in ("leave", "reset"):
            await asyncio.sleep(0.005)
            if asked.leaving == "reset":
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            return b""
        while chunk := await reader.read(65536):
            received += chunk
    except (ConnectionError, OSError):
        pass  # a reply may be cut off by the reset that answers what was never read
    finally:
        writer.close()
    return received


def judge(asked: Attempt, received: bytes) -> str:
    """The status, or an AssertionError that says what is wrong with the answer."""
    if asked.leaving in ("leave", "reset", "leave stream"):
        return "left"
    if received.startswith(CONTINUE):
        received = received.removeprefix(CONTINUE)
    if not received:
        assert not asked.answered, "no answer"
        return "closed"
    answer = Answer(received, head_only=asked.answered and asked.data.startswith(b"HEAD "))
    assert answer.whole or not asked.answered, f"the reply is cut off: {received[-200:]!r}"
    assert not answer.rest, f"more than one reply: {answer.rest[:200]!r}"
    if answer.status >= 500 and answer.status != 505:  # 505 asks for HTTP/1.1
        deadline = answer.status in (408, 504) and (asked.short_deadline or asked.slow)
        assert deadline or b'"unavailable"' in answer.body, (
            f"{answer.status}: {answer.body[:400]!r}"
        )
    for word in (b"Traceback", b'File \\"', b".py", b"site-packages"):
        assert word not in answer.body, f"{answer.status} tells of the code: {answer.body[:400]!r}"
    if answer.status >= 400 and answer.body:
        _judge_refusal(asked, answer)
    elif answer.kind == "text/event-stream" and answer.whole:
        _judge_stream(answer)
    elif answer.kind == "application/json" and answer.whole and answer.body:
        json.loads(answer.body)
    return str(answer.status)


def _judge_refusal(asked: Attempt, answer: Answer) -> None:
    assert answer.kind == "application/json", (
        f"{answer.status} is {answer.kind!r}: {answer.body[:200]!r}"
    )
    body = json.loads(answer.body)
    errors = (
        [result["error"] for result in body["results"]] if "results" in body else [body["error"]]
    )
    for error in errors:
        assert error["code"] and 8 < len(error["message"]) < 5000, error
        assert SECRET not in error["message"] or asked.what.startswith(("fields", "json")), (
            f"a prompt in {error['message']!r}"
        )
        assert "retryable" in error or {"type", "param"} <= error.keys(), error
    assert answer.status not in (405,) or answer.headers["allow"]
    assert answer.status not in (429,) or int(answer.headers["retry-after"]) > 0


def _judge_stream(answer: Answer) -> None:
    """Every frame is read, and the last one says that it is the last."""
    frames = answer.body.decode().strip().split("\n\n")
    last = frames.pop()
    assert last == "data: [DONE]" or last.startswith("event: done\ndata: {"), last[:200]
    for frame in frames:
        data = frame.rpartition("data: ")[2]
        assert frame == f"data: {data}" or frame.startswith("event: "), frame[:200]
        json.loads(data)


def bits(reply: Any) -> list[Any]:
    return [
        [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in result.choices]
        for result in reply.results
    ]


async def ask(client: AsyncClient, body: dict[str, Any]) -> list[Any]:
    for _ in range(200):
        try:
            return bits(await client.generate(body["requests"], sampling=body["sampling"]))
        except ServerError as error:  # the storm may fill the queue
            assert error.code == "queue_full", error
            await asyncio.sleep(0.1)
    raise AssertionError("the queue stays full")


async def storm(server: ServerProcess, seed: int, indices: range) -> Counter[str]:
    """All attempts, sound requests between them, and a probe all the time."""
    host, port = server.url.removeprefix("http://").split(":")
    address, left, seen = (host, int(port)), iter(indices), Counter[str]()
    done = asyncio.Event()

    async def attack() -> None:
        for index in left:
            asked = attempt(seed, index)
            try:
                outcome = judge(asked, await asyncio.wait_for(send(address, asked), ANSWER_S))
            except Exception as error:
                raise AssertionError(
                    f"request {index} of seed {seed} ({asked.what}): "
                    f"{type(error).__name__}: {error}"
                ) from error
            seen[f"{asked.what.partition(':')[0]}: {outcome}"] += 1

    async def be_sound() -> None:
        async with AsyncClient(server.url, timeout_s=ANSWER_S) as client:
            for body in itertools.cycle(SOUND):
                if done.is_set():
                    return
                assert await ask(client, body) == reference[json.dumps(body)], (
                    "a sound request has other bits than before the storm"
                )
                seen["sound"] += 1

    async def probe() -> None:
        async with AsyncClient(server.url, timeout_s=ANSWER_S) as client:
            while not done.is_set():
                started = time.monotonic()
                assert await client.is_ready()
                took = time.monotonic() - started
                assert took < PROBE_S, f"a probe took {took:.1f} s"
                seen["probe"] += 1
                await asyncio.sleep(0.05)

    async with AsyncClient(server.url, timeout_s=ANSWER_S) as client:
        reference = {json.dumps(body): await ask(client, body) for body in SOUND}
    async with asyncio.TaskGroup() as group:
        group.create_task(be_sound())
        group.create_task(probe())
        attackers = [group.create_task(attack()) for _ in range(CONCURRENCY)]
        await asyncio.gather(*attackers)
        done.set()
    return seen


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def free_pages(client: Client) -> float:
    return float(
        next(
            line.split()[1]
            for line in client.metrics().splitlines()
            if line.startswith("tlt_pages_free ")
        )
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server with the shipped pair and small limits, so that no request costs much."""
    root = tmp_path_factory.mktemp("weights")
    with ServerProcess(*PAIR, *map(str, LIMITS), "--weight-root", str(root)) as running:
        yield running


def survives(server: ServerProcess, seed: int, count: int) -> None:
    warm = max(min(1000, count // 2), count // 10)
    with Client(server.url, timeout_s=60) as client:
        pids, free = (server.process.pid, engine(server.process.pid)), free_pages(client)
        seen = uvloop.run(storm(server, seed, range(warm)))
        before = {pid: resident_mb(pid) for pid in pids}
        started = time.monotonic()
        seen += uvloop.run(storm(server, seed, range(warm, count)))
        took_s = time.monotonic() - started
        print(f"{count - warm} requests in {took_s:.0f} s; {dict(sorted(seen.items()))}")
        assert sum(seen.values()) - seen["sound"] - seen["probe"] == count and seen["sound"] > 0
        assert seen["probe"] > 0
        until(lambda: not look(client).open and free_pages(client) == free)
        grown = {pid: round(resident_mb(pid) - megabytes) for pid, megabytes in before.items()}
        print(f"resident memory grew by {grown} MB")
        assert engine(server.process.pid) == pids[1] and max(grown.values()) < GROWTH_MB, grown
        uvloop.run(storm(server, seed, range(20)))  # and it still answers
    said = "\n".join(server.lines)
    assert "unexpected_error" not in said and "Traceback" not in said and SECRET not in said, said[
        -4000:
    ]


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.long)])
def test_hostile_requests_leave_the_server_unchanged(target: ServerProcess, count: int) -> None:
    survives(target, 1, count)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_hostile_requests_leave_the_server_unchanged(target: ServerProcess) -> None:
    survives(target, 2, 120_000)
