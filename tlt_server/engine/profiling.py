"""Measures the time of steps before requests come, for the cost model.

The engine itself runs them: batches of a few sizes, at two contexts, each without drafts and with
every number of decode rows that the policy may choose, in turns with short, long and wide trees of
every drafter. Nothing is learnt of the drafts, which follow meaningless prompts. A profile ends
when its time is up; what is then missing is interpolated, and corrected by the steps that serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tlt_server.commands import Submit
from tlt_server.engine.loop import Engine
from tlt_server.records import OFF, GenerateRequest, Sampling, Strategy
from tlt_server.speculation.cost import Measured, load_of
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.speculation.switches import SwitchLog

SIZES = (8, 64, 1, 256, 24)  # requests of a batch
CONTEXTS = (8, 256)  # tokens
PER_DRAFTER = 6  # strategies of a drafter that are measured with one batch
STRIDE = 5  # between the shapes of trees that follow each other
MEASURED = 2  # steps of each kind, after one that does not count
LONGEST = 96  # tokens that a request may generate meanwhile


def profile(engine: Engine, vocab_size: int, max_model_len: int, seconds: float) -> list[Measured]:
    """Return the steps measured within this time."""
    until = time.perf_counter() + seconds
    measured: list[Measured] = []
    policy = engine.policy
    with nothing_learnt(engine):
        for context in CONTEXTS:
            for size in _sizes(engine, max_model_len):
                if time.perf_counter() < until and context + LONGEST <= max_model_len:
                    strategies = _some(policy.strategies(size, prompts=False))
                    measured += _measure(engine, strategies, size, context, vocab_size, until)
    return measured


@contextmanager
def nothing_learnt(engine: Engine) -> Iterator[None]:
    """Run steps of meaningless prompts, under any policy, without consequences."""
    policy, knowledge, switches = engine.policy, engine.knowledge, engine.switches
    engine.knowledge, engine.switches, engine.runner.learns = Knowledge(()), SwitchLog(), False
    try:
        yield
    finally:
        engine.policy, engine.knowledge, engine.switches = policy, knowledge, switches
        engine.runner.learns = True
        engine.scheduler.pool.clear_index()


def _some(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Return strategies of each drafter, evenly over their numbers of draft rows and in turns over
    the shapes of their trees.
    """
    by_rows: dict[str, dict[int, list[Strategy]]] = {}
    for strategy in strategies:
        same = by_rows.setdefault(strategy.drafter, {})
        same.setdefault(strategy.draft_rows(1), []).append(strategy)
    found = []
    for sizes in by_rows.values():
        trees_S = [*sizes.values()]
        some = np.unique(np.linspace(0, len(trees_S) - 1, PER_DRAFTER).round().astype(int))
        found += [trees_S[s][STRIDE * i % len(trees_S[s])] for i, s in enumerate(some.tolist())]
    return found


def _sizes(engine: Engine, max_model_len: int) -> list[int]:
    running = engine.scheduler.running
    most = min(running.max_running, running.pool.pages * running.pool.page_size // max_model_len)
    fit = min(running.max_running, running.pool.available // 40)
    return list(dict.fromkeys(min(size, max(1, most, fit)) for size in SIZES))


def _measure(
    engine: Engine,
    strategies: list[Strategy],
    size: int,
    context: int,
    vocab_size: int,
    until: float,
) -> Iterator[Measured]:
    """Run one batch under each strategy in turn."""
    sampling = Sampling(max_tokens=LONGEST, ignore_eos=True)
    engine.policy = Fixed(OFF)
    engine.send(
        Submit(
            [
                GenerateRequest(
                    id=f"profile-{size}-{context}-{i}",
                    token_ids=[(31 * i + 7 * t) % vocab_size for t in range(context)],
                    seed=i,
                    sampling=sampling,
                )
                for i in range(size)
            ]
        )
    )
    engine.step()
    while not engine.idle and (cycle := engine.last_cycle) and cycle.context.decoding < size:
        engine.step()
    for strategy in strategies:
        engine.policy = Fixed(strategy)
        seen = 0
        for _ in range(2 + MEASURED):  # on a GPU, the first result is of the strategy before
            if engine.idle or time.perf_counter() > until:
                break
            engine.step()
            cycle = engine.last_cycle
            if cycle is not None and cycle.strategy == strategy:
                seen += 1
                if 1 < seen <= 1 + MEASURED:
                    yield Measured(load_of(cycle), cycle.step_s)
    engine.scheduler.abort([], all=True)
    while engine.runner.in_flight:
        engine.step()
