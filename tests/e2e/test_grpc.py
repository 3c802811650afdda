"""gRPC as users start it: the example's trainer, and the bits of HTTP."""

import os
import sys
from pathlib import Path

import grpc

from tests.processes import completed
from tlt_client import Client
from tlt_client.rpc import GenerateRequest, Item, RolloutServiceStub, SamplingFields
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_trainer.py"


def test_grpc_example_trains_through_one_channel(pushable: ServerProcess) -> None:
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


def test_http_and_grpc_give_the_same_bits(pushable: ServerProcess) -> None:
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
