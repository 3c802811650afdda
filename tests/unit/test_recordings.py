"""Strategies whose graphs are not recorded: left alone until they would have repaid it."""

from __future__ import annotations

import numpy as np

from tests.unit.test_goodput import World, gpu_seconds
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.start.recordings import GraphRecordings, Key
from tlt_server.engine.gpu.steps.buckets import MIN_DEPTH, Shapes
from tlt_server.engine.gpu.steps.extend import SecondHalf
from tlt_server.speculation.policies.goodput import Goodput
from tlt_server.wire.records import OFF, StepContext, Strategy

SHAPES = Shapes(8, MIN_DEPTH)
CHAIN = Strategy("eagle", 7, 1, 8, 56)
CONTEXT = StepContext(8, 0, 300.0, 8)


class Pool(GraphPool):
    """Graphs that are names."""

    def __init__(self) -> None:
        super().__init__(None)
        self._stream = object()  # type: ignore[assignment]

    def add(self, *keys: Key | None) -> None:
        for key in keys:
            if key is not None:
                self._graphs[key], self.seconds[key] = key, 0.05  # type: ignore[assignment]
                self.changes += 1

    def add_step(self, strategy: Strategy) -> None:
        shape = SHAPES.step(8, strategy)
        self.add(shape.draft, shape.extend)


def following(pool: Pool) -> GraphRecordings:
    recordings = GraphRecordings(SHAPES)
    recordings.follow(pool)
    return recordings


def missing(recordings: GraphRecordings, context: StepContext = CONTEXT) -> list[int]:
    """Return what chains of 6 and 7 with 64 decode rows lack."""
    found = recordings.missing(context, "eagle", (6, 7), (1,), np.array([64]))
    return found.reshape(-1).tolist()


def test_missing_graphs_are_derived_from_recorded_ones() -> None:
    pool = Pool()
    recordings = following(pool)
    assert missing(recordings) == [2, 2]
    pool.add_step(CHAIN)
    assert missing(recordings) == [1, 0]
    filtered = StepContext(8, 0, 300.0, 8, filtered=True)
    assert missing(recordings, filtered) == [2, 1]
    structured = StepContext(8, 0, 300.0, 8, structured=True)
    key = SHAPES.step(8, CHAIN).extend._replace(structured=True)
    assert missing(recordings, structured) == [3, 2], "a pass of two halves"
    pool.add(key)
    assert missing(recordings, structured) == [2, 1]
    pool.add(SecondHalf(key))  # type: ignore[arg-type]
    assert missing(recordings, structured) == [1, 0]
    pool._stream = None
    assert missing(recordings) == [0], "a device that captures nothing"


def test_strategy_is_recorded_once_its_savings_repay_the_cost() -> None:
    pool = Pool()
    pool.add_step(OFF)
    recordings = following(pool)
    told = [recordings.want(CONTEXT, CHAIN, 0.0101) for _ in range(12)]
    assert told.index(True) == 9, "two graphs of 50 ms each, 10 ms a step"
    shape = SHAPES.step(8, CHAIN)
    assert [*recordings.wanted()] == [shape.draft, shape.extend]
    pool.add_step(CHAIN)
    assert not [*recordings.wanted()]
    pool._full = True
    assert not recordings.want(CONTEXT, Strategy("eagle", 5, 1, 8, 56), 10.0)


def test_goodput_uses_recorded_graphs_until_a_new_one_pays() -> None:
    pool = Pool()
    pool.add_step(OFF)
    world = World(gpu_seconds)
    world.policy = Goodput(world.knowledge, sizes=SHAPES, recordings=following(pool))
    steps = 0
    while (strategy := world.step(8)) == OFF:
        steps += 1
        assert steps < 100, "nothing is ever recorded"
    assert steps > 2
    pool.add_step(strategy)
    for _ in range(5):
        used = world.step(8)
        assert used.shape == strategy.shape or not used.drafter


def test_best_strategy_is_recorded_at_once_without_any_graph() -> None:
    world = World(gpu_seconds)
    world.policy = Goodput(world.knowledge, sizes=SHAPES, recordings=following(Pool()))
    assert world.step(8) != OFF
