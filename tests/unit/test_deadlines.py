"""Deadlines in the scheduler, to start by and to end by, hold while nothing runs; the heap finds
what a scan of all sequences would.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_kv import FakeKV, run, running, sequence
from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.wire.records import StepOutput


def by_deadline(
    clock: Callable[[], float],
    kv: FakeKV | None = None,
    *,
    max_running: int = 2,
    gate: StepGate | None = None,
) -> Scheduler:
    return Scheduler(
        gate or StepGate(),
        running(40, max_running, 8),
        max_rows=8,
        lookahead=2,
        weight_version="v1",
        clock=clock,
        on_start=(kv or FakeKV()).start,
    )


def codes(outputs: list[StepOutput]) -> list[tuple[str, str | None]]:
    return [(output.id, output.error and output.error[0]) for output in outputs]


def test_sequence_not_started_in_time_gets_a_typed_error() -> None:
    now = 0.0
    scheduler = by_deadline(lambda: now, max_running=1)
    scheduler.submit([sequence(i, [i], 9, i, begin_by_s=2.0, deadline_s=5.0) for i in range(2)])
    scheduler.next_batch()
    now = 2.0
    assert codes(scheduler.expire()) == [("r1", "queue_timeout")]
    now = 5.0
    assert codes(scheduler.expire()) == [("r0", "deadline_exceeded")]
    scheduler.check()
    assert scheduler.idle and scheduler.pool.available == 40


@pytest.mark.parametrize("reason", [Reason.PAUSED, Reason.DRAINING])
def test_deadlines_expire_while_no_sequence_starts(reason: Reason) -> None:
    now, gate = 0.0, StepGate()
    scheduler = by_deadline(lambda: now, gate=gate)
    scheduler.submit([sequence(0, [1], 9, 0, deadline_s=3.0)])
    scheduler.next_batch()
    gate.hold(reason)
    scheduler.submit(
        [sequence(1, [2], 9, 1, begin_by_s=1.0), sequence(2, [3], 9, 2, deadline_s=3.0)]
    )
    scheduler.next_batch()
    now = 1.0
    assert codes(scheduler.expire()) == [("r1", "queue_timeout")]
    now = 3.0
    assert codes(scheduler.expire()) == [("r0", "deadline_exceeded"), ("r2", "deadline_exceeded")]
    assert scheduler.idle and scheduler.pool.available == 40


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_deadlines_match_a_twin_that_checks_every_sequence(seed: int, steps: int) -> None:
    """The slow twin asks all that is open at every step; ids are used again."""
    draw, now, count = random.Random(seed), 0.0, 0
    kv = FakeKV()
    scheduler = by_deadline(lambda: now, kv)
    twin: dict[str, Sequence] = {}
    for _ in range(steps):
        now += draw.random()
        late = {
            s.id: "deadline_exceeded"
            for s in twin.values()
            if s.request.deadline_s is not None and s.request.deadline_s <= now
        }
        unbegun = {
            s.id: "queue_timeout"
            for s in twin.values()
            if s.request.begin_by_s is not None
            and s.request.begin_by_s <= now
            and not s.has_started
        }
        ended = scheduler.expire()
        assert dict(codes(ended)) == unbegun | late and len(ended) == len(unbegun | late)
        for output in ended:
            del twin[output.id]
        moments = [draw.choice([None, now + 4 * draw.random()]) for _ in range(2)]
        new = [
            sequence(i, [i % 40], 6, i, begin_by_s=moments[0], deadline_s=moments[1])
            for i in {
                count + k if draw.random() < 0.7 else draw.randrange(count + 1)
                for k in range(draw.randint(0, 3))
            }
            if f"r{i}" not in twin
        ]
        count += 3
        scheduler.submit(new)
        twin.update((s.id, s) for s in new)
        if twin and draw.random() < 0.3:
            gone = draw.choice(list(twin))
            scheduler.abort([gone])
            del twin[gone]
        if batch := scheduler.next_batch():
            for output in scheduler.commit(batch, run(scheduler, batch, kv, draw)):
                if output.finish_reason is not None:
                    del twin[output.id]
        scheduler.check()


def test_deadlines_of_ended_sequences_take_bounded_memory() -> None:
    scheduler = by_deadline(lambda: 0.0)
    for i in range(2000):
        scheduler.submit([sequence(i, [1], 2, 0, begin_by_s=1e6, deadline_s=1e6)])
        scheduler.abort([f"r{i}"])
    assert len(scheduler._open.deadlines._heap) <= 80
