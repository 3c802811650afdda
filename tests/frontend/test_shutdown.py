"""A signal while something waits or is being sent: each is told with one typed error, at once, and
the server leaves.
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.frontend.fake_engine import HANGS, UNANSWERED
from tests.frontend.test_command import Served, await_open, no_variables, served
from tests.frontend.test_rpc import refused
from tests.waiting import until
from tlt_client import Client, Retries, ServerError
from tlt_client.rpc import Manifest, Part, RolloutServiceStub, UpdateWeightsRequest
from tlt_client.rpc import rollout_pb2 as proto

__all__ = ["no_variables"]  # a fixture
# More than a reply to half a body takes, less than fake_server.py leaves to replies on their way.
PROMPT_S = 30
MANIFEST = UpdateWeightsRequest(manifest=Manifest(version="v", path="hangs"))
GROUP: dict[str, Any] = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
}


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Served]:
    with served(
        "plain",
        model,
        *("--grpc-port", "0", "--state-dir", str(tmp_path)),
        *("--weight-channels", "disk,http,broadcast", "--weight-root", str(tmp_path)),
        *("--drain-timeout-s", "0.3"),
    ) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def stub(server: Served) -> Iterator[RolloutServiceStub]:
    [address] = [line.split()[3] for line in server.lines if line.endswith(" for gRPC")]
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(60)
        yield RolloutServiceStub(channel)


def ends(server: Served, *calls: Callable[[], Any], uploads: int = 0) -> list[BaseException | None]:
    """Return what each call raises after the server was told to stop, which it does at once. By
    then this many uploads have begun, and the other calls wait for the engine.
    """

    def arrived() -> bool:
        waiting = sum(UNANSWERED in line for line in server.lines)
        listed = httpx.get(f"{server.url}/weights", timeout=60).json()["uploads"]
        return waiting == len(calls) - uploads and len(listed) == uploads

    with ThreadPoolExecutor(len(calls)) as pool:
        asked: list[Future[Any]] = [pool.submit(call) for call in calls]
        until(lambda: arrived() or any(call.done() for call in asked))
        assert not any(call.done() for call in asked)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        errors = [call.exception(PROMPT_S) for call in asked]
        assert server.ended() == 0 and time.monotonic() - started < PROMPT_S
    assert not any(
        "Traceback" in line or "CancelledError" in line or "unexpected_error" in line
        for line in server.lines
    ), server.lines
    return errors


def test_each_waiting_call_learns_of_the_shutdown_once(server: Served) -> None:
    """A refused request may be sent again, but none of these: each may have been done."""
    host, port = server.url.removeprefix("http://").split(":")

    def put() -> None:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                b"PUT /weights/w/p.safetensors HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000
            )
            said = b""
            while piece := connection.recv(2**16):
                said += piece
        assert said.startswith(b"HTTP/1.1 503 ") and said.count(b"HTTP/1.1") == 1
        assert b"shutting down and reads no more of the body" in said and b'"unavailable"' in said
        raise InterruptedError

    def pause() -> None:
        """Wait for the end of the request that runs."""
        assert httpx.post(f"{server.url}/pause?mode=wait", timeout=60).status_code == 503
        raise InterruptedError

    tries = Retries(times=2, first_s=0.1)
    with (
        Client(server.url, timeout_s=60) as client,
        Client(server.url, timeout_s=60, retries=tries) as patient,
    ):
        thread = threading.Thread(target=lambda: client.generate([{"token_ids": [HANGS]}]))
        thread.start()
        await_open(server)
        *errors, paused, half = ends(
            server,
            lambda: client.push_weights("v", path="hangs"),
            lambda: patient.join_group("hangs", **GROUP),
            pause,
            put,
            uploads=1,
        )
        thread.join(30)
        assert isinstance(half, InterruptedError) and isinstance(paused, InterruptedError)
        for error in errors:
            assert isinstance(error, ServerError)
            assert (error.status, error.code, error.retryable) == (500, "engine_failed", True)
            assert "may be done or not" in error.message and "GET /weights" in error.message


def test_each_waiting_grpc_call_learns_of_the_shutdown_once(
    server: Served, stub: RolloutServiceStub
) -> None:
    over = threading.Event()

    def half() -> Iterator[UpdateWeightsRequest]:
        yield UpdateWeightsRequest(
            part=Part(version="w", part="p.safetensors", data=b"x" * 100, total=1000)
        )
        over.wait(60)

    def asked(call: Callable[[], Any]) -> Callable[[], Any]:
        def ask() -> None:
            raise refused(call)

        return ask

    try:
        errors = ends(
            server,
            asked(lambda: stub.UpdateWeights(iter([MANIFEST]), timeout=60)),
            asked(lambda: stub.UpdateWeights(half(), timeout=60)),
            asked(
                lambda: stub.JoinGroup(proto.JoinGroupRequest(name="hangs", **GROUP), timeout=60)
            ),
            uploads=1,
        )
    finally:
        over.set()
    assert [error.code for error in errors if isinstance(error, ServerError)] == [
        "engine_failed",
        "unavailable",
        "engine_failed",
    ]
    assert all("shutting down" in str(error) for error in errors)
