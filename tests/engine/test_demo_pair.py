"""The shipped pair in the real engine: what speculation saves in passes, and the accept lengths its
card promises.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest

from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.wire.commands import Submit
from tlt_server.wire.records import Strategy

REQUESTS, MAX_TOKENS = 24, 160


class Run(NamedTuple):
    tokens: dict[str, list[int]]
    passes: int
    accept_length: float
    seconds: float


def rollout(policy: str, strategy: Strategy | None = None) -> Run:
    engine, _ = assemble(
        EngineSettings(
            model=str(TARGET),
            device="cpu",
            drafter=str(DRAFTER),
            policy=policy,
            sd_strategy=strategy.name if strategy else "",
            kv_memory_mb=256,
        )
    )
    requests = problems_as_requests(TARGET, REQUESTS, group=4, seed=50, max_tokens=MAX_TOKENS)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    engine.send(Submit(requests))
    passes = emitted = rows = 0
    started = time.process_time()
    while not engine.idle:
        for output in engine.step():
            tokens[output.id] += output.token_ids
        if cycle := engine.last_cycle:
            passes += 1
            if cycle.drafted:
                emitted, rows = emitted + cycle.emitted, rows + cycle.context.decoding
    return Run(tokens, passes, emitted / max(1, rows), time.process_time() - started)


@pytest.fixture(scope="module")
def plain() -> Run:
    return rollout("off")


@pytest.mark.parametrize(
    ("rows", "promised"), [pytest.param(16, 3.5, marks=pytest.mark.long), (32, 4.8)]
)
def test_demo_pair_keeps_its_accept_length_at_depth_7(
    plain: Run, rows: int, promised: float
) -> None:
    run = rollout("fixed", Strategy("eagle", 7, 8, rows))
    assert run.tokens == plain.tokens
    assert run.accept_length >= promised
    assert run.passes <= plain.passes / 3


def test_history_drafter_saves_passes(plain: Run) -> None:
    run = rollout("fixed", Strategy("history", 8, 2, 9))
    assert run.tokens == plain.tokens
    assert run.passes <= 0.85 * plain.passes and run.accept_length > 1.2


def test_goodput_policy_saves_passes(plain: Run) -> None:
    run = rollout("goodput")
    assert run.tokens == plain.tokens
    assert run.passes <= 0.9 * plain.passes
    assert run.seconds <= 3 * plain.seconds  # processor time: the machine may be busy
