"""Steps that run while no request does: a first rollout, and measured steps for the cost model, at
start or once a policy needs them.

The engine itself runs them: batches of a few sizes and contexts, each without drafts and with every
number of decode rows that the policy may choose, alternating short, long and wide trees of every
drafter. Each batch gets its share of the time, so a slow machine measures fewer strategies of each,
not fewer batches. If prompts alone take longer, their steps stand for those of many rows with
drafts. Nothing is learned about the drafts, which follow meaningless prompts. Missing times are
interpolated, and corrected by serving steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np

from tlt_server.engine.loop import Engine
from tlt_server.speculation.cost import Measured, load_of
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.wire.commands import Submit
from tlt_server.wire.records import OFF, GenerateRequest, Sampling, Strategy

# Requests of a batch, and the tokens of their prompts. Time that one leaves is for the next ones.
BATCHES = ((1, 256), (8, 8), (8, 256), (24, 8), (64, 8), (256, 8))
PER_DRAFTER = 6  # strategies of a drafter that are measured with one batch
STRIDE = 5  # between the shapes of trees that follow each other
MEASURED = 2  # steps of each kind, after one that does not count
LONGEST = 96  # tokens that a request generates at most


class StepProfile:
    """Measures one batch at a time, then fits the engine's cost model to all."""

    def __init__(self, engine: Engine, vocab_size: int, max_model_len: int, seconds: float) -> None:
        self._engine, self._vocab_size, self._left_s = engine, vocab_size, seconds
        self._generated = _generated(max_model_len)
        self._batches = _batches(engine, max_model_len)
        self.measured: list[Measured] = []

    def advance(self) -> bool:
        """Measure the next batch under the active policy; nothing else may run. Return False after
        the last.
        """
        engine, started_s = self._engine, time.perf_counter()
        until = started_s + self._left_s / len(self._batches)
        size, context = self._batches.pop(0)
        strategies = _some(engine.choice.policy.strategies(range(size, size + 1), prompts=False))
        with nothing_learnt(engine):
            self.measured += _measure(
                engine, strategies, size, context, self._vocab_size, self._generated, until
            )
        self._left_s -= time.perf_counter() - started_s
        if self._batches:
            return True
        engine.choice.knowledge.cost.profile(self.measured)
        engine.choice.knowledge_file.save(engine.choice.knowledge)
        return False


@contextmanager
def nothing_learnt(engine: Engine) -> Iterator[None]:
    """Run steps of meaningless prompts, under any policy, without consequences. Cached prefixes
    stay, unless their pages are needed.
    """
    choice, prefixes = engine.choice, engine.scheduler.pool.indexed
    engine.choice, engine.runner.learns = choice.unlearning(), False
    try:
        yield
    finally:
        engine.choice, engine.runner.learns = choice, True
        engine.scheduler.pool.clear_index(prefixes)


def warm_up(engine: Engine, arms: Iterable[Strategy], vocab_size: int, max_model_len: int) -> None:
    """Run a short rollout without drafts, then with a strategy of each drafter, so that libraries
    are loaded and memory is allocated before the first request.
    """
    length = max(1, min(8, max_model_len - 8))
    reached = engine.choice.policy.strategies(range(1, 2), prompts=False)
    by_drafter = {strategy.drafter: strategy for strategy in (*arms, *reached)}
    for i, strategy in enumerate(by_drafter.values()):
        engine.choice.policy = Fixed(strategy)
        engine.send(
            Submit(
                [
                    GenerateRequest(
                        id=f"warm-{i}",
                        token_ids=[t % vocab_size for t in range(length)],
                        seed=0,
                        sampling=Sampling(max_tokens=6, ignore_eos=True),
                    )
                ]
            )
        )
        while not engine.idle:
            engine.step()


def _some(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Return strategies of each drafter, spread over the numbers of draft rows and the shapes of
    trees. The drafters alternate, so any first few cover all of them.
    """
    by_rows: dict[str, dict[int, list[Strategy]]] = {}
    for strategy in strategies:
        same = by_rows.setdefault(strategy.drafter, {})
        same.setdefault(strategy.draft_rows(1), []).append(strategy)
    found = []
    for sizes in by_rows.values():
        trees_S = [*sizes.values()]
        some = np.unique(np.linspace(0, len(trees_S) - 1, PER_DRAFTER).round().astype(int))
        own = [trees_S[s][STRIDE * i % len(trees_S[s])] for i, s in enumerate(some.tolist())]
        found.append(own[::2] + own[1::2])
    return [strategy for turn in zip_longest(*found) for strategy in turn if strategy is not None]


def _batches(engine: Engine, max_model_len: int) -> list[tuple[int, int]]:
    """Return the sizes and contexts of the batches that fit the engine."""
    running = engine.scheduler.running
    most = min(running.max_running, running.pool.pages * running.pool.page_size // max_model_len)
    fit = min(running.max_running, running.pool.available // 40)
    longest = max_model_len - _generated(max_model_len)
    within = [(min(size, max(1, most, fit)), min(context, longest)) for size, context in BATCHES]
    return list(dict.fromkeys(within))


def _generated(max_model_len: int) -> int:
    """Return the tokens that each request generates. Short sequences are half prompt."""
    return min(LONGEST, max_model_len // 2)


def _measure(
    engine: Engine,
    strategies: list[Strategy],
    size: int,
    context: int,
    vocab_size: int,
    generated: int,
    until: float,
) -> Iterator[Measured]:
    """Run one batch under each strategy in turn."""
    sampling = Sampling(max_tokens=generated, ignore_eos=True)
    engine.choice.policy = Fixed(OFF)
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
        if time.perf_counter() >= until:
            yield Measured(load_of(cycle), cycle.step_s)
        engine.step()
    for i, strategy in enumerate(strategies):
        engine.choice.policy = Fixed(strategy)
        seen = 0
        while seen <= MEASURED and not engine.idle and (not i or time.perf_counter() < until):
            engine.step()  # on a GPU, the first result is of the strategy before
            cycle = engine.last_cycle
            if cycle is not None and cycle.strategy == strategy:
                seen += 1
                if seen > 1:
                    yield Measured(load_of(cycle), cycle.step_s)
    engine.scheduler.abort([], all=True)
    while engine.runner.in_flight:
        engine.step()
