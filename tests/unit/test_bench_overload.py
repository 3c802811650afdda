"""Judgement of answers by `tlt bench overload`, and the moments at which it sends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import timed
from tlt_server.bench import load
from tlt_server.bench.goodput import GoodputSize, judge, percentile
from tlt_server.bench.load import Answer, arrivals, closed_loop, open_loop

SIZE = GoodputSize(ramp_s=1.0, window_s=4.0, timeout_s=2.0)


def answer(
    status: int,
    content: dict[str, Any] | bytes,
    *,
    sent_s: float = 2.0,
    seconds: float = 0.5,
    retry_after: str = "",
) -> Answer:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Answer(
        sent_s - 0.01, sent_s, sent_s + seconds, status, {"retry-after": retry_after}, body
    )


def completed(tokens: int, **how: float) -> Answer:
    choice = {
        "index": 0,
        "token_ids": [1] * tokens,
        "text": None,
        "logprobs": [0.0] * tokens,
        "finish_reason": "stop",
        "stop_reason": None,
        "seed": 1,
        "weight_versions": [],
        "sd": {},
    }
    return answer(
        200,
        {"results": [{"id": "a", "choices": [choice]}], "usage": {}, "numerics": "strict"},
        **how,
    )  # type: ignore[arg-type]


def refused(code: str, retry_after: str = "3", status: int = 429) -> Answer:
    return answer(
        status,
        {"error": {"code": code, "message": "m", "retryable": True}},
        retry_after=retry_after,
        seconds=0.02,
    )


def late() -> Answer:
    error = {"code": "deadline_exceeded", "message": "m", "retryable": True}
    return answer(
        504,
        {"results": [{"id": "a", "error": error}], "usage": {}, "numerics": "strict"},
        seconds=2.0,
    )


def test_goodput_counts_timely_completions_in_the_window() -> None:
    phase = judge(
        [
            completed(40),
            completed(99, sent_s=0.1),
            completed(99, sent_s=4.6),
            completed(99, seconds=2.5),
            late(),
        ],
        0.0,
        SIZE,
        SIZE.timeout_s,
        [],
    )
    assert phase.ends == {"completed": 3, "late": 2}
    assert (phase.goodput, phase.per_s, phase.offered_per_s, phase.completed_s) == (
        10.0,
        0.25,
        1.0,
        [0.5],
    )


def test_overload_refusals_must_be_typed_with_retry_after() -> None:
    phase = judge(
        [
            refused("overloaded"),
            refused("queue_full"),
            refused("overloaded", ""),
            answer(429, b"too much"),
            refused("unavailable", status=503),
            answer(0, b"reset"),
            answer(200, b"{}"),
        ],
        0.0,
        SIZE,
        SIZE.timeout_s,
        [],
    )
    assert phase.ends == {"overloaded": 2, "queue_full": 1, "broken": 3, "unavailable": 1}
    assert phase.untyped_sheds == 2 and phase.shed == 4 and phase.shed_ms[0] == pytest.approx(20)
    assert phase.lag_ms == pytest.approx(10)


def test_percentiles_are_observed_values() -> None:
    assert percentile([float(i) for i in range(1, 101)], 99) == 99
    assert percentile([3.0], 50) == 3
    assert percentile([], 99) == 0


def test_bench_arrivals_are_seeded_and_have_the_given_rate() -> None:
    moments = list(arrivals(50, 100, seed=1))
    assert moments == list(arrivals(50, 100, seed=1)) != list(arrivals(50, 100, seed=2))
    assert len(moments) == pytest.approx(5000, rel=0.06)  # 4 standard deviations
    assert moments == sorted(moments) and 0 < moments[0] and moments[-1] < 100


def test_open_loop_sends_without_waiting_and_closed_loop_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(load, "time", now)
    open_now, most, takes_s = 0, 0, 0.2

    async def ask(due_s: float) -> Answer:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(takes_s)
        open_now -= 1
        return Answer(due_s, due_s, now.perf_counter(), 200, {}, b"")

    answers = timed(open_loop(ask, 100, 0.3, seed=0))
    assert len(answers) == len(list(arrivals(100, 0.3, seed=0))) and most > 10
    most, takes_s = 0, 1.0
    assert len(timed(closed_loop(ask, 3, 1.5))) == 6 and most == 3
