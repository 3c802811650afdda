"""Judges one phase of `tlt bench overload`: the end of each request, goodput and refusals."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import msgspec

from tlt_client.wire import Reply, WireError
from tlt_server.bench.load import Answer


class GoodputSize(NamedTuple):
    ramp_s: float  # start of each phase, not counted
    window_s: float
    timeout_s: float  # deadline of a request


class _Refusal(msgspec.Struct):
    error: WireError


class LoadPhase(NamedTuple):
    """The ends of one phase's requests, all of which were answered."""

    ends: dict[str, int]  # completed | late | an error's code | broken -> requests
    goodput: float  # tokens per second of requests completed in time, within the window
    per_s: float  # such requests per second
    offered_per_s: float
    completed_s: list[float]
    shed_ms: list[float]
    untyped_sheds: int  # 429 without a code that can be retried, or without Retry-After
    lag_ms: float  # 99th percentile of how late the load itself was
    memory_mib: list[tuple[float, float]]  # frontend's and engine's, every second

    @property
    def shed(self) -> int:
        return len(self.shed_ms)


def judge(
    answers: list[Answer],
    started_s: float,
    size: GoodputSize,
    timeout_s: float,
    memory_mib: list[tuple[float, float]],
) -> LoadPhase:
    ends: Counter[str] = Counter()
    completed_s, shed_ms, tokens, untyped = [], [], 0, 0
    for answer in answers:
        end, given = _end(answer)
        if end == "completed" and answer.seconds > timeout_s:
            end = "late"
        ends[end] += 1
        if (
            end == "completed"
            and size.ramp_s <= answer.ended_s - started_s < size.ramp_s + size.window_s
        ):
            completed_s.append(answer.seconds)
            tokens += given
        elif answer.status == 429:
            shed_ms.append(answer.seconds * 1e3)
            untyped += end == "broken" or not answer.headers.get("retry-after", "").isdigit()
    return LoadPhase(
        ends=dict(ends),
        goodput=tokens / size.window_s,
        per_s=len(completed_s) / size.window_s,
        offered_per_s=len(answers) / (size.ramp_s + size.window_s),
        completed_s=completed_s,
        shed_ms=shed_ms,
        untyped_sheds=untyped,
        lag_ms=percentile([(answer.sent_s - answer.due_s) * 1e3 for answer in answers], 99),
        memory_mib=memory_mib,
    )


def _end(answer: Answer) -> tuple[str, int]:
    """Return how the request ended, and its number of tokens."""
    try:
        if answer.status in (200, 504):
            [result] = msgspec.json.decode(answer.body, type=Reply).results
            if answer.status == 200:
                return (
                    ("completed", len(result.choices[0].token_ids))
                    if result.choices
                    else ("broken", 0)
                )
            return (
                "late"
                if result.error is not None and result.error.code == "deadline_exceeded"
                else "broken",
                0,
            )
        error = msgspec.json.decode(answer.body, type=_Refusal).error
    except (ValueError, msgspec.MsgspecError):
        return "broken", 0
    return error.code if error.retryable else "broken", 0


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that at least `part` percent do not exceed; 0 if empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * part / 100) - 1)] if ordered else 0.0
