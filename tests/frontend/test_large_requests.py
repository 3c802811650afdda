"""Large requests, right, wrong and hostile, over HTTP and gRPC: how long they hold the loop, what
they cost in memory, and what other users notice.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.loop_holds import loop_holds
from tests.frontend.test_limits import connect, head
from tests.frontend.tiny_model import write_model
from tests.mostly_long import mostly_long
from tests.waiting import until
from tlt_server.frontend.weights.broadcasts import MAX_TENSORS

MIB = 2**20
BODY = 15 * MIB
HELD_S = 0.1  # bound on one pass of the loop: five times the promise, for a slow core under load
PROBE_S = 0.01  # between two probes
ANSWERED_S = 1.0  # bound on most probes and short texts, on two slow cores under load
LINE = "a line of text, as long as some others are\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("model"))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2**24 - 1}))
    engine = {"max_model_len": 2**24 - 1, "step_s": 0.0}
    settings = {"max_queue_tokens": 10**8, "max_page_forecast": 10**6, "grpc_port": 0}
    with live_server(model, engine=engine, **settings) as running:
        httpx.post(f"{running.url}/tokenize", json={"prompt": LINE * 100}, timeout=60)
        yield running


class Case(NamedTuple):
    path: str
    body: Callable[[], bytes]
    says: str = ""  # what the refusal says; empty: it is taken


def members(member: bytes, size: int = BODY) -> bytes:
    return b",".join([member] * (size // (len(member) + 1)))


def items(count: int, **fields: Any) -> bytes:
    return json.dumps({"requests": [fields] * count, "sampling": {"max_tokens": 1}}).encode()


GENERATE, CHAT = "/generate", "/v1/chat/completions"
STOPS = b'{"requests":[{"prompt":"a","sampling":{"stop":[%s]}}]}'
MESSAGES = b'{"messages":[%s]}'
CASES = {
    "tokens": Case("/detokenize", lambda: b'{"tokens":[%s]}' % members(b"65", 4 * MIB)),
    "text": Case("/tokenize", lambda: json.dumps({"prompt": LINE * 30_000}).encode()),
    "messages": Case(
        "/tokenize",
        lambda: json.dumps({"messages": [{"role": "user", "content": LINE}] * 10_000}).encode(),
    ),
    "stops": Case(GENERATE, lambda: STOPS % members(b"1"), "stop has"),
    "parts": Case(
        CHAT, lambda: MESSAGES % (b'{"role":"a","content":[%s]}' % members(b'{"type":"x"}')), "mem"
    ),
    "lists": Case(
        CHAT, lambda: MESSAGES % (b'{"role":"a","content":"a","x":[%s]}' % members(b"[]")), "mem"
    ),
    "items": Case(GENERATE, lambda: b'{"requests":[%s]}' % members(b"{}"), "max_batch_items"),
    "depth": Case(GENERATE, lambda: b'{"requests":' + b"[" * BODY, "nested too deeply"),
    "key": Case(GENERATE, lambda: b'{"%s":1}' % (b"a" * BODY), "is missing"),
    "aborted": Case("/engine/abort", lambda: b'{"ids":[%s]}' % members(b'"a"'), "ids has"),
}
BATCHES = {
    "ids": (GENERATE, lambda: items(1500, token_ids=[*range(250)] * 8), 1500),
    "texts": (GENERATE, lambda: items(1000, prompt=LINE * 40), 1000),
    "rollout": (GENERATE, lambda: items(1500, token_ids=[*range(250)] * 8), 1500),
    "choices": (GENERATE, lambda: items(32, prompt="a", n=256), 8192),
    "sglang": (
        GENERATE,
        lambda: json.dumps({"input_ids": [[*range(250)] * 8] * 1000}).encode(),
        1000,
    ),
}
TENSORS = {
    "manifest": (
        "/update_weights",
        lambda names: {
            **{"version": "v", "channel": "broadcast", "group": "g"},
            "tensors": [{"name": name, "dtype": "float32", "shape": [2, 3]} for name in names],
        },
    ),
    "vllm": (
        "/update_weights",
        lambda names: {"update_info": listed(names) | {"dtype_names": ["float32"] * len(names)}},
    ),
    "sglang": (
        "/update_weights_from_distributed",
        lambda names: listed(names) | {"dtypes": ["float32"] * len(names)},
    ),
}
RPC = {
    "empty items": lambda: b"\x0a\x00" * (BODY // 2),
    "empty messages": lambda: submessage(1, b"\x22\x00" * (BODY // 2)),
}
LARGE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def listed(names: list[str]) -> dict[str, Any]:
    return {"names": names, "shapes": [[2, 3]] * len(names)}


def submessage(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


@contextmanager
def probed(server: LiveServer) -> Iterator[list[float]]:
    """Ask for a probe and for a short text's tokens all the while; give how long each took."""
    took, over = list[float](), threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not over.is_set():
                for send in (
                    lambda: client.get("/livez"),
                    lambda: client.post("/tokenize", json={"prompt": "2+2="}),
                ):
                    began = time.perf_counter()
                    assert send().status_code == 200
                    took.append(time.perf_counter() - began)
                over.wait(PROBE_S)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield took
        finally:
            over.set()
            asking.result()


@contextmanager
def memory(server: LiveServer) -> Iterator[Callable[[], float]]:
    """Give a function that returns the MiB by which this process and the reading process have
    grown at their peaks.
    """
    pids = [os.getpid(), server.service.reader.pid]

    def read(field: str) -> int:
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
        return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))

    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what it has now
    before = read("VmRSS")
    yield lambda: (read("VmHWM") - before) / 1024


@pytest.mark.parametrize("name", mostly_long(CASES, "tokens", "lists"))
def test_large_body_does_not_block_the_loop(server: LiveServer, name: str) -> None:
    case = CASES[name]
    body = case.body()
    with loop_holds(server) as holds, probed(server) as took, memory(server) as grown:
        reply = httpx.post(f"{server.url}{case.path}", content=body, timeout=120)
        peak_mb = grown()
    assert reply.status_code == 200 if not case.says else case.says in reply.text, reply.text[:200]
    assert holds.longest_s < HELD_S
    assert sorted(took)[len(took) * 9 // 10] < ANSWERED_S
    if case.says:
        assert reply.status_code in (400, 413)
        assert peak_mb < 64 + 4 * len(body) / MIB


@pytest.mark.parametrize("name", mostly_long(BATCHES, "ids"))
def test_large_batch_does_not_block_the_loop(server: LiveServer, name: str) -> None:
    path, body, sequences = BATCHES[name]
    content = body()
    server.engine.deaf = True  # it runs in the same loop
    try:
        with loop_holds(server) as holds, probed(server) as took, ThreadPoolExecutor(1) as pool:
            headers = {"Idempotency-Key": name} if "rollout" in name else {}
            asked = pool.submit(
                httpx.post, f"{server.url}{path}", content=content, headers=headers, timeout=60
            )
            while len(server.client) < sequences and not asked.done():
                time.sleep(0.01)
            held_s = holds.longest_s
            server.call(lambda: server.client.abort(server.client.open_ids))
            server.engine.deaf = False
            assert asked.result().status_code == 200, asked.result().text[:200]
    finally:
        server.engine.deaf = False
    assert held_s < HELD_S
    assert sorted(took)[len(took) * 9 // 10] < ANSWERED_S


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose loop its engine does not share."""
    model = write_model(tmp_path_factory.mktemp("model"))
    settings = {"max_queue_tokens": 10**8, "max_page_forecast": 10**6}
    with live_server(model, engine={"step_s": 0.0}, apart=True, **settings) as running:
        httpx.post(f"{running.url}/tokenize", json={"prompt": LINE * 100}, timeout=60)
        yield running


@pytest.mark.parametrize("how", mostly_long(["reply", "stream", "rollout"], "stream"))
def test_end_of_a_large_batch_does_not_block_the_loop(apart: LiveServer, how: str) -> None:
    body = {
        "requests": [{"prompt": "abc", "n": 256}] * 16,
        "sampling": {"max_tokens": 40},
        "stream": how == "stream",
    }
    headers = {"Idempotency-Key": "k"} if how == "rollout" else {}
    with loop_holds(apart) as holds:
        reply = httpx.post(f"{apart.url}/generate", json=body, headers=headers, timeout=120)
        while len(apart.client):
            time.sleep(0.01)
    assert reply.status_code == 200, reply.text[:200]
    assert reply.text.count('"finish_reason":"length"') == 4096
    assert holds.longest_s < HELD_S


@pytest.mark.parametrize("name", mostly_long(TENSORS, "vllm"))
def test_call_with_the_most_tensors_does_not_block_the_loop(server: LiveServer, name: str) -> None:
    path, body = TENSORS[name]
    content = json.dumps(body([f"n{i}" for i in range(MAX_TENSORS)])).encode()
    server.engine.deaf = True  # it runs in the same loop
    try:
        with loop_holds(server) as holds, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{server.url}{path}", content=content, timeout=60)
            while not server.client._weight_answers and not asked.done():
                time.sleep(0.01)
            server.run(asyncio.sleep(0.01))  # the pass that sent them is over
            held_s = holds.longest_s
            server.engine.deaf = False
            assert asked.result().status_code == 200, asked.result().text[:200]
    finally:
        server.engine.deaf = False
    assert held_s < HELD_S


@pytest.mark.parametrize("name", RPC)
def test_a_message_of_many_parts_is_refused_before_it_is_parsed(
    server: LiveServer, name: str
) -> None:
    message = RPC[name]()
    with (
        grpc.insecure_channel(server.grpc_address, LARGE) as channel,
        loop_holds(server) as holds,
        memory(server) as grown,
    ):
        call = channel.unary_unary("/tlt.v1.RolloutService/GenerateBatch")
        with pytest.raises(grpc.RpcError, match="more than 65536 members; that is the limit"):
            call(message, timeout=60)
        assert grown() < 64 + 4 * len(message) / MIB
    assert holds.longest_s < HELD_S


def test_work_of_a_departed_client_is_dropped(server: LiveServer) -> None:
    reader, body = server.service.reader, json.dumps({"prompt": [LINE * 60] * 100}).encode()
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGSTOP)
    try:
        with connect(server) as connection:
            connection.sendall(head("/v1/completions", content_length=len(body)) + body)
            until(lambda: any(reader._under_way))
            (job,) = filter(None, reader._under_way)
        until(job.done.cancelled)
    finally:
        os.kill(reader.pid, signal.SIGCONT)
    until(lambda: not any(reader._under_way))
    assert not job.values and not any(map(len, reader._lanes))
    assert not any(len(request.token_ids) > 50 * len(LINE) for request in server.engine.submitted)
