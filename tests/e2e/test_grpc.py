"""gRPC as users start it: the example's trainer, an engine that dies, SIGTERM under open streams;
and without the flag nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import grpc
import pytest

from tests.e2e.test_lifecycle import FAST_START
from tests.processes import completed
from tlt_client import Client
from tlt_client.errors import EngineFailed
from tlt_client.rpc import (
    GenerateRequest,
    Item,
    RolloutServiceStub,
    SamplingFields,
    WatchEventsRequest,
)
from tlt_client.rpc.rollout_pb2 import GetInfoRequest
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_trainer.py"
LONG = GenerateRequest(
    requests=[Item(prompt="2+2=", n=2, seed=7)],
    sampling=SamplingFields(max_tokens=700, ignore_eos=True),
)


def test_the_example_trains_through_one_channel(pushable: ServerProcess) -> None:
    done = completed(
        [sys.executable, str(EXAMPLE), pushable.grpc_address, str(TARGET), "--steps", "2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    committed = [at for at, line in enumerate(lines) if line.startswith("committed step-")]
    assert [lines[at].split()[1] for at in committed] == ["step-1", "step-2"]
    second = [line for line in lines[committed[0] + 1 : committed[1]] if line.strip()]
    assert len(second) == 8 and all(" step-1 " in line for line in second), (
        "rollouts of step 2 come from the weights of step 1"
    )


def test_both_transports_give_the_same_bits(pushable: ServerProcess) -> None:
    items = [{"id": "a", "prompt": "2+2=", "n": 2, "seed": 7}]
    same = GenerateRequest(
        requests=[Item(id="a", prompt="2+2=", n=2, seed=7)], sampling=SamplingFields(max_tokens=40)
    )
    with (
        Client(pushable.url, timeout_s=60) as client,
        grpc.insecure_channel(pushable.grpc_address) as channel,
    ):
        http = client.generate(items, sampling={"max_tokens": 40}).results[0].choices
        rpc = RolloutServiceStub(channel).GenerateBatch(same).results[0].choices
    expected = [(choice.token_ids, choice.logprobs, choice.seed, choice.text) for choice in http]
    assert expected == [
        ([*choice.token_ids], [*choice.logprobs], choice.seed, choice.text) for choice in rpc
    ]


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
