"""gRPC as users start it: the example's trainer, an engine that dies, SIGTERM under open streams;
and without the flag nothing of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.e2e.conftest import DRAFTING
from tests.e2e.test_lifecycle import FAST_START
from tlt_client import Client
from tlt_client.errors import EngineFailed, Unavailable
from tlt_client.rpc import (
    GenerateRequest,
    Item,
    RolloutServiceStub,
    SamplingFields,
    WatchEventsRequest,
    error_of,
)
from tlt_client.rpc.rollout_pb2 import GetInfoRequest
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_trainer.py"
LONG = GenerateRequest(
    requests=[Item(prompt="2+2=", n=2, seed=7)],
    sampling=SamplingFields(max_tokens=700, ignore_eos=True),
)


def test_the_example_trains_through_one_channel(tmp_path: Path) -> None:
    with ServerProcess(
        *DRAFTING, "--grpc-port", "0", "--weight-channels", "http", "--state-dir", str(tmp_path)
    ) as server:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), server.grpc_address, str(TARGET), "--steps", "2"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        assert [
            line.split()[:2] for line in done.stdout.splitlines() if line.startswith("committed")
        ] == [["committed", "step-1"], ["committed", "step-2"]]
        second = (
            done.stdout.partition("committed step-1")[2]
            .partition("committed")[0]
            .strip()
            .splitlines()[1:]
        )
        assert len(second) == 8 and all(" step-1 " in line for line in second), (
            "rollouts of step 2 came from what step 1 pushed"
        )
        with (
            Client(server.url, timeout_s=60) as client,
            grpc.insecure_channel(server.grpc_address) as channel,
        ):
            items = [{"id": "a", "prompt": "2+2=", "n": 2, "seed": 7}]
            http = client.generate(items, sampling={"max_tokens": 40}).results[0].choices
            same = GenerateRequest(
                requests=[Item(id="a", prompt="2+2=", n=2, seed=7)],
                sampling=SamplingFields(max_tokens=40),
            )
            rpc = RolloutServiceStub(channel).GenerateBatch(same).results[0].choices
            assert [
                (choice.token_ids, choice.logprobs, choice.seed, choice.text) for choice in http
            ] == [
                (list(choice.token_ids), list(choice.logprobs), choice.seed, choice.text)
                for choice in rpc
            ], "to the last bit"


@pytest.mark.long
def test_sigterm_lets_streams_end_and_takes_nothing_new() -> None:
    with (
        ServerProcess(*FAST_START, "--grpc-port", "0") as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        stub, health = RolloutServiceStub(channel), HealthStub(channel)
        stream, events = stub.Generate(LONG), stub.WatchEvents(WatchEventsRequest())
        assert next(stream).token.token_ids and next(events).state.ready
        assert health.Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(events).state.draining and list(events) == []
        assert health.Check(HealthCheckRequest()).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.GenerateBatch(LONG)
        error = error_of(caught.value)
        assert (
            isinstance(error, Unavailable)
            and "draining" in error.message
            and error.retry_after_s == 5
        )
        told = list(stream)
        assert [event.WhichOneof("event") for event in told[-2:]] == ["result", "done"]
        assert [len(choice.token_ids) for choice in told[-2].result.choices] == [700, 700]
        assert server.process.wait(60) == 0


@pytest.mark.long
def test_an_engine_that_dies_is_told_of_and_comes_back() -> None:
    with (
        ServerProcess(*FAST_START, "--grpc-port", "0") as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        stub = RolloutServiceStub(channel)
        stream, events = stub.Generate(LONG), stub.WatchEvents(WatchEventsRequest())
        assert next(stream).token.token_ids
        pid = next(events).state.engine_pid
        assert pid == stub.GetInfo(GetInfoRequest()).engine.pid
        os.kill(pid, signal.SIGKILL)
        told = list(stream)
        assert told[-2].error.error.code == EngineFailed.of_code and told[-2].error.error.retryable
        states = iter(event.state for event in events)
        assert "restarted" in next(state for state in states if not state.ready).reason
        assert next(state for state in states if state.ready).engine_pid not in (0, pid)
        short = GenerateRequest(requests=LONG.requests, sampling=SamplingFields(max_tokens=4))
        assert stub.GenerateBatch(short).results[0].choices
        events.cancel()


@pytest.mark.long
def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tlt_server",
                "serve",
                *FAST_START,
                "--port",
                "0",
                "--grpc-port",
                port,
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (
            done.returncode == 2
            and f"cannot bind 127.0.0.1:{port} for gRPC" in done.stderr
            and "--grpc-port" in done.stderr
        )


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    script = (
        "import sys, tlt_server.build; "
        "print(sorted({'grpc', 'google.protobuf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
