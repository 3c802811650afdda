"""Detached batches over a kill of the whole server: token for token and bit for bit an undisturbed
run's.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_lifecycle import FAST_START, QUESTION
from tests.waiting import until
from tlt_client import Client, Reply, Rollout
from tlt_client.wire import ItemResult
from tlt_server.demo.server import ServerProcess

LONG = {"max_tokens": 320, "ignore_eos": True}
ITEMS: list[dict[str, Any]] = [
    {"id": "group", "messages": QUESTION, "n": 3, "seed": 11},
    {
        "id": "penalised",
        "prompt": "1+1=",
        "seed": 12,
        "sampling": {
            **LONG,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.1,
            "min_tokens": 20,
            "temperature": 0.7,
        },
    },
    {
        "id": "reported",
        "prompt": "12*3=",
        "seed": 13,
        "sampling": {
            **LONG,
            "logprobs": 3,
            "raw_logprobs": True,
            "prompt_logprobs": 2,
            "top_k": 30,
            "top_p": 0.95,
        },
    },
    {"id": "greedy", "prompt": "7-2=", "seed": 16, "sampling": {**LONG, "temperature": 0.0}},
    {"id": "short", "messages": QUESTION, "seed": 14, "sampling": {"max_tokens": 300}},
    {
        "id": "stopped",
        "messages": QUESTION,
        "seed": 15,
        "sampling": {"max_tokens": 400, "ignore_eos": True, "stop": ["=30", "99"]},
    },
]


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> Reply:
    """Return the reply of a server that drafts and never dies."""
    with Client(server.url, timeout_s=60) as client:
        return client.generate(ITEMS, sampling=LONG)


def said(result: ItemResult) -> list[Any]:
    """Everything but how it was sped up."""
    assert not result.error, result
    return [
        (
            c.index,
            c.token_ids,
            c.text,
            c.logprobs,
            c.raw_logprobs,
            c.top_logprobs,
            c.prompt_logprobs,
            c.finish_reason,
            c.stop_reason,
            c.seed,
            c.weight_versions,
        )
        for c in result.choices
    ]


def await_tokens(rollout: Rollout, least: int) -> None:
    until(lambda: rollout.fetch().progress.tokens > least)
    assert rollout.fetch().status == "running"


def check_same(reply: Reply, expected: Reply) -> None:
    assert [result.id for result in reply.results] == [item["id"] for item in ITEMS]
    for mine, theirs in zip(reply.results, expected.results, strict=True):
        assert said(mine) == said(theirs), mine.id
    assert reply.usage.completion_tokens == expected.usage.completion_tokens


def test_killed_and_restarted_server_continues_its_rollouts(
    undisturbed: Reply, tmp_path: Path
) -> None:
    """The connection breaks, the trainer knows nothing, repeats itself, and nothing ran twice."""

    def start(client: Client, key: str) -> str:
        return client.generate(ITEMS, sampling=LONG, idempotency_key=key, detach=True).id

    flags = (*FAST_START, "--state-dir", str(tmp_path))
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as client:
        ids = [start(client, key) for key in ("step-1", "step-2")]
        await_tokens(client.rollout(ids[0]), 300)
        server.process.kill()
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as client:
        assert [summary.id for summary in client.rollouts()] == ids
        assert start(client, "step-1") == ids[0]
        for id in ids:
            check_same(client.rollout(id).result(400), undisturbed)
        assert len(client.rollouts()) == 2
