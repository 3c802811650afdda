"""What one engine step takes: `tlt bench decode` (plain, several batch sizes) and `tlt bench cycle` (draft, verify, accept).

One engine in this process, its requests submitted straight to the loop. Timed are full-batch decode steps from the end of one to the
end of the next, as the host sees them, so nothing is left out that a server would pay; the figure is their median.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from tlt_server.engine.loop import Engine
from tlt_server.records import OFF, Abort, GenerateRequest, Strategy, Submit
from tlt_server.speculation.policies.fixed import Fixed

SETTLE = 8  # steps at full batch before any is timed


class Timed(NamedTuple):
    """Steps of one batch under one strategy."""

    batch: int
    strategy: str
    context: int  # tokens of a request when timing began
    steps: int
    step_ms: float  # median
    quartiles_ms: tuple[float, float]
    rate: float  # tokens per second of the whole batch, over all timed steps
    accept_length: float  # tokens per request and step


def time_steps(engine: Engine, requests: list[GenerateRequest], strategy: Strategy = OFF, *, most: int = 400) -> Timed:
    """Run these requests as one batch until the first of them ends or `most` steps are timed; then they are aborted."""
    engine.policy = Fixed([strategy])
    engine.send(Submit(requests))
    batch, seen = len(requests), 0
    durations: list[float] = []
    tokens = context = 0
    last = 0.0
    while not engine.idle and len(durations) < most:
        engine.step()
        now, cycle = time.perf_counter(), engine.last_cycle
        if cycle is None:
            continue
        if cycle.context.decoding < batch or cycle.context.prefill_rows:
            if durations:
                break
            continue
        seen += 1
        if seen > SETTLE:
            durations.append(now - last)
            tokens += cycle.emitted
            context = context or int(cycle.context.mean_context)
        last = now
    engine.send(Abort([], all=True))
    while not engine.idle:
        engine.step()
    assert len(durations) > 1, f"a batch of {batch} never decoded as a whole for more than {SETTLE} steps: give longer requests"
    low, middle, high = statistics.quantiles(durations, n=4)
    return Timed(batch, strategy.name, context, len(durations), middle * 1e3, (low * 1e3, high * 1e3), tokens / sum(durations),
                 tokens / batch / len(durations))
