"""Goodput by key at three times what the server can do: one greedy key and nine small ones."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.hostile.victim import SMALL, Victim
from tlt_server.bench.goodput import GoodputSize, judge
from tlt_server.bench.load import ANSWER_S, Answer, Connections, closed_loop, open_loop
from tlt_server.demo.workload import problems_as_requests

CLOSED = 96  # requests open at once while the peak is measured
MAX_TOKENS = 128
LOAD = 3.0  # demand of all keys, in peaks
SMALL_PART = 0.45  # demand of the small keys, in peaks: each asks for half of a fair share


class TenantSize(NamedTuple):
    peak_s: float
    load_s: float
    timeout_s: float


def tenants(victim: Victim, model: Path, size: TenantSize, seed: int = 0) -> dict[str, Any]:
    """Return what each side asked for, and the share of it that was completed in time."""
    return asyncio.run(_tenants(victim, model, size, seed))


async def _tenants(victim: Victim, model: Path, size: TenantSize, seed: int) -> dict[str, Any]:
    requests = problems_as_requests(model, 256, group=2, seed=seed, max_tokens=MAX_TOKENS)
    connections, serial = Connections(victim.url), itertools.count(1)

    def ask(due_s: float, keys: Callable[[], str], timeout_s: float) -> Coroutine[Any, Any, Answer]:
        number = next(serial)
        body = {
            "requests": [{"token_ids": requests[number % len(requests)].token_ids, "seed": number}],
            "timeout_s": timeout_s,
            "sampling": {"max_tokens": MAX_TOKENS},
        }
        return connections.post("/generate", msgspec.json.encode(body), due_s, key=keys())

    everybody = partial(next, itertools.cycle(("hostile", *SMALL)))
    started_s = time.perf_counter()
    answers = await closed_loop(
        partial(ask, keys=everybody, timeout_s=ANSWER_S), CLOSED, size.peak_s
    )
    peak = judge(
        answers, started_s, GoodputSize(0.25 * size.peak_s, 0.75 * size.peak_s, 0), ANSWER_S, []
    )
    small = partial(next, itertools.cycle(SMALL))
    sides: dict[str, tuple[Callable[[], str], float]] = {
        "greedy": (lambda: "hostile", (LOAD - SMALL_PART) * peak.per_s),
        "small": (small, SMALL_PART * peak.per_s),
    }
    started_s = time.perf_counter()
    answered = await asyncio.gather(
        *(
            open_loop(
                partial(ask, keys=keys, timeout_s=size.timeout_s), rate, size.load_s, seed + i
            )
            for i, (keys, rate) in enumerate(sides.values())
        )
    )
    connections.close()
    figures: dict[str, Any] = {"peak_per_s": round(peak.per_s, 1)}
    for name, found in zip(sides, answered, strict=True):
        ends = judge(found, started_s, GoodputSize(0, 1e9, 0), size.timeout_s, []).ends
        figures[f"{name}_ends"] = ends
        figures[f"{name}_share"] = round(ends.get("completed", 0) / max(1, len(found)), 4)
    return figures
