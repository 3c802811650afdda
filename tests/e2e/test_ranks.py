"""A real server whose target is shared by two processes: it says so, and goes on with the same
tokens after one of them was killed.
"""

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from benchmarks.record import main
from tests.e2e.conftest import DRAFTING
from tests.processes import engine, ranks
from tests.waiting import until
from tlt_client import Client, Reply
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

ASKED = [{"prompt": f"Compute {i}*4+5.", "seed": i} for i in range(4)]
SAMPLING = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0}


def outputs(reply: Reply) -> list[tuple[list[int], list[float]]]:
    found = [choice for result in reply.results for choice in result.choices]
    return [(list(choice.token_ids), list(choice.logprobs)) for choice in found]


def memory_by_rank(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^tlt_engine_process_resident_memory_bytes{rank=\"(.)\"} (.+)$", text, re.M)
    return {rank: float(value) for rank, value in found}


def test_shared_target_takes_a_push_and_continues_after_a_kill(tmp_path: Path) -> None:
    new = perturbed_copy(TARGET, tmp_path / "new")
    flags = ("--device", "cpu", "--tensor-parallel", "2", "--weight-root", str(tmp_path))
    state = ("--state-dir", str(tmp_path / "state"))
    with (
        ServerProcess(*DRAFTING, *flags, *state, "--port", "0") as server,
        Client(server.url, timeout_s=60) as client,
    ):
        info = client.server_info()
        assert info["tp_size"] == info["engine"]["tensor_parallel"] == 2 and info["num_gpus"] == 0
        assert info["vllm_config"]["parallel_config"]["tensor_parallel_size"] == 2
        assert info["engine"]["fingerprint"]["leaves"] == 2
        client.update_weights(str(new), "v1")
        expected = outputs(client.generate(ASKED, sampling=SAMPLING))
        killed_engine = engine(server.process.pid)
        [rank] = ranks(killed_engine)
        memory = memory_by_rank(server.url)
        assert memory.keys() == {"0", "1"} and min(memory.values()) > 1e8
        rollout = client.generate(ASKED, sampling=SAMPLING, detach=True)
        until(lambda: rollout.fetch().progress.tokens > 20, 60)
        os.kill(rank, signal.SIGKILL)
        assert outputs(rollout.result(120)) == expected
        assert engine(server.process.pid) != killed_engine, "the epoch went on without a rank"
        last = engine(server.process.pid)
        [rank] = ranks(last)
        os.kill(last, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{rank}").exists(), 5)


@pytest.mark.long
def test_faults_of_ranks_are_recorded(tmp_path: Path) -> None:
    record, pair = tmp_path / "faults.json", ("--model", str(TARGET), "--drafter", str(DRAFTER))
    flags = ("--device", "cpu", "--tensor-parallel", "2", *pair)
    assert main(["faults", "--json", str(record), "--", *flags]) == 0
    rows = json.loads(record.read_text())["figures"]["rows"]
    assert [(row["fault"], row["rank"]) for row in rows] == [
        ("killed", 1),
        ("killed", 0),
        ("stopped", 1),
        ("stopped", 0),
    ]
    assert all(row["noticed_s"] < (3 if row["fault"] == "killed" else 15) for row in rows)
