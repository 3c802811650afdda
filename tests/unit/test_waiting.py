"""The order in which sequences start: of arrival for one owner, by turns for several, by priority
and not for ever after others.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_kv import FakeKV, collect, make, run, sequence
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.schedule.waiting import AGED, PREPAID, QUANTUM, WaitingSequences
from tlt_server.wire.records import StepOutput


def waits(
    i: int, owner: str = "", *, priority: int = 0, prompt: int = 8, max_tokens: int = 8
) -> Sequence:
    found = sequence(i, [1] * prompt, max_tokens, i, owner=owner, priority=priority)
    found.arrived_s = float(i)
    return found


def starts(waiting: WaitingSequences, count: int) -> list[Sequence]:
    started = []
    for _ in range(count):
        started.append(next(waiting.order()))
        waiting.start(started[-1], started[-1].prompt_len)
        waiting.check()
    return started


def ids(sequences: list[Sequence]) -> list[int]:
    return [int(each.id[1:]) for each in sequences]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.randoms())
def test_one_tenant_runs_in_arrival_order_after_preempted_ones(
    operations: list[int], draw: random.Random
) -> None:
    waiting, twin = WaitingSequences(), list[Sequence]()  # the twin is the queue as a list
    running: list[Sequence] = []
    for i, operation in enumerate(operations):
        if operation < 2:
            twin.append(waits(i, prompt=draw.randint(1, 900)))
            waiting.add(twin[-1])
        elif operation == 2 and twin:
            running += starts(waiting, 1)
            assert running[-1] is twin.pop(0)
        elif running:
            twin.insert(0, running.pop())
            waiting.put_back(twin[0])
        assert list(waiting.order()) == twin and len(waiting) == len(twin)


def test_owners_take_turns_by_tokens() -> None:
    waiting = WaitingSequences()
    for i in range(40):
        waiting.add(waits(i, "greedy", prompt=QUANTUM, max_tokens=PREPAID))
    for i in range(40, 240):
        waiting.add(waits(i, "small", prompt=QUANTUM // 8, max_tokens=PREPAID // 8))
    tokens = Counter[str]()
    for each in starts(waiting, 90):
        tokens[each.owner] += each.prompt_len + each.remaining
        if tokens.total() > 2 * QUANTUM:
            assert abs(tokens["greedy"] - tokens["small"]) <= QUANTUM + 2 * (QUANTUM + PREPAID)
    assert len(waiting) == 150


def test_output_tokens_are_charged_as_generated() -> None:
    waiting = WaitingSequences()
    first, *_ = talkative = [waits(i, "talks", max_tokens=10**4) for i in range(4)]
    for each in [*talkative, *(waits(i, "brief") for i in range(4, 8))]:
        waiting.add(each)
    assert starts(waiting, 1) == [first]
    first.length += 10 * QUANTUM
    waiting.emitted(first, 10 * QUANTUM)
    assert [each.owner for each in starts(waiting, 4)] == ["brief"] * 4


def test_priorities_run_first_and_no_request_starves() -> None:
    waiting = WaitingSequences()
    for i in range(100):
        waiting.add(waits(i, priority=i % 3 - 1))
    order = starts(waiting, 33)
    late = [each for each in order if each.request.priority > -1]
    assert ids(late) == [1, 2, 4, 5], "every 8th start is the one that has waited longest"
    assert [order.index(each) for each in late] == [AGED * (k + 1) - 1 for k in range(4)]


def serve(scheduler: Scheduler, kv: FakeKV, steps: int) -> dict[str, list[StepOutput]]:
    seen: dict[str, list[StepOutput]] = {}
    for _ in range(steps):
        if batch := scheduler.next_batch():
            collect(scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0))), seen)
        scheduler.check()
    return seen


def test_key_with_all_slots_makes_room_for_a_second_key() -> None:
    scheduler, kv = make(400, max_running=8, max_rows=64)
    scheduler.submit([sequence(i, [i, 2], 300, i, owner="greedy") for i in range(12)])
    serve(scheduler, kv, 2)
    assert [each.owner for each in scheduler.running] == ["greedy"] * 8
    scheduler.submit([sequence(i, [i], 2, i, owner="small") for i in range(20, 24)])
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0)))
    assert [chunk.sequence.id for chunk in batch.chunks] == [
        *(f"r{i}" for i in (0, 1, 2, 3, 4, 5, 20, 21))
    ], "half of its share at once"
    assert scheduler.preemptions == 2
    serve(scheduler, kv, 8)
    assert {each.owner for each in scheduler.running} == {"greedy"}, "the small ones are done"


def test_key_with_all_pages_makes_room_for_a_second_key() -> None:
    scheduler, kv = make(40, max_running=8, max_rows=400)
    scheduler.submit([sequence(i, [i] * 30, 8, i, owner="greedy") for i in range(8)])
    serve(scheduler, kv, 1)
    assert scheduler.pool.available < 12
    scheduler.submit([sequence(20, [20] * 36, 3, 20, owner="small")])
    serve(scheduler, kv, 1)
    assert "small" in [each.owner for each in scheduler.running]


def test_prompt_rows_are_divided_between_owners() -> None:
    scheduler, kv = make(400, max_running=8, max_rows=64)
    scheduler.submit(
        [sequence(i, [*range(45)] * 4, 2, i, owner="greedy", salt=f"{i}") for i in range(2)]
    )
    serve(scheduler, kv, 1)
    scheduler.submit([sequence(20, [1, 2, 3], 2, 20, owner="small")])
    batch = scheduler.next_batch()
    assert batch is not None
    assert [(chunk.sequence.id, chunk.end - chunk.start) for chunk in batch.chunks] == [
        ("r0", 61),
        ("r20", 3),
    ]
