"""The orders of calls that trainers document which broadcast their weights, over real gloo groups
whose rank 0 is another process.

After every round what is live is, tensor by tensor, what the trainer has broadcast. Rollouts run
all the while; the orders stand in `gloo_trainer`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import PAIR
from tests.e2e.gloo_trainer import ORDERS
from tests.e2e.trainers import Rollout, rolling
from tlt_client import Client
from tlt_server.demo.server import ServerProcess

ROOT = Path(__file__).parents[2]
PROMPT = list(b"Compute 3*4+5.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("state")
    with ServerProcess(
        *PAIR,
        "--weight-channels",
        "broadcast",
        "--state-dir",
        str(state),
        "--weight-timeout-s",
        "60",
    ) as running:
        yield running


def trainer(order: str, url: str, *seeds: int) -> list[dict[str, Any]]:
    """Run the trainer; return what it printed after each round."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.gloo_trainer", order, url, *map(str, seeds)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def completion(url: str, i: int) -> Rollout | None:
    response = httpx.post(
        f"{url}/inference/v1/generate",
        timeout=120,
        json={
            "token_ids": PROMPT,
            "sampling_params": {
                "max_tokens": 200,
                "seed": i,
                "ignore_eos": True,
                "temperature": 1.0,
            },
        },
    )
    if response.status_code == 503:
        return None
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return Rollout(
        choice["token_ids"], choice["weight_versions"], choice["finish_reason"] == "abort"
    )


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_what_is_live_is_what_the_trainer_has_broadcast(order: str, server: ServerProcess) -> None:
    first = 10 * sorted(ORDERS).index(order) + 1
    with Client(server.url, timeout_s=60) as client:
        before = dict(client.weight_checksums())
        with rolling(lambda i: completion(server.url, i)) as rollouts:
            said = trainer(order, server.url, first, first + 1)
        assert len(said) == 2 and said[0]["version"] != said[1]["version"]
        for round in said:
            assert round["live"] == round["mine"] and len(round["mine"]) > 8
        assert all(
            said[0]["mine"][name] not in (before[name], said[1]["mine"][name])
            for name in said[0]["mine"]
        )
        assert client.weights()["open"] == {} and client.weights()["target"] == said[1]["version"]
    assert rollouts
    for rollout in rollouts:
        assert [span["start"] for span in rollout.spans] == [
            0,
            *(span["end"] for span in rollout.spans[:-1]),
        ][: len(rollout.spans)]
        assert (rollout.spans[-1]["end"] if rollout.spans else 0) == len(rollout.token_ids)
