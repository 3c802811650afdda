"""One greedy and nine small keys at three times what the engine can do: admission and scheduler
together, in simulated time.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest

from tests.unit.fake_kv import make
from tests.unit.test_admission import ENGINE, Clock
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import Overloaded, QueueFull
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, Sampling, StepContext

pytestmark = pytest.mark.slow  # simulates load for seconds

STEP_S = 0.01
TOKENS, PROMPT, SLOTS = 9, 4, 8
CAPACITY = SLOTS / ((TOKENS + 1) * STEP_S)  # sequences per second
SMALL = [f"small-{i}" for i in range(9)]
LOAD = {"greedy": 2.4 * CAPACITY} | dict.fromkeys(SMALL, 0.6 * CAPACITY / 9)
TIMEOUT_S = 1.0


class Ends(NamedTuple):
    asked: Counter[str]
    done: Counter[str]  # in time
    refused: Counter[str]

    def share(self, owners: list[str]) -> float:
        return sum(self.done[o] for o in owners) / sum(self.asked[o] for o in owners)


def simulate(*, keys: bool, seconds: float = 20.0, max_queue: int = 60) -> Ends:
    clock, draw = Clock(), random.Random(5)
    admission = Admission(
        max_queue=max_queue, max_queue_tokens=10**6, max_page_forecast=100.0, clock=clock
    )
    admission.engine = ENGINE
    scheduler, _ = make(400, max_running=SLOTS, max_rows=64)
    scheduler._clock = clock
    ends, who = Ends(Counter(), Counter(), Counter()), dict[str, str]()
    due = sorted(
        (moment, owner)
        for owner, rate in LOAD.items()
        for moment in (draw.random() * seconds for _ in range(round(rate * seconds)))
    )
    while clock.now < seconds or not scheduler.idle:
        while due and due[0][0] <= clock.now:
            _, owner = due.pop(0)
            ends.asked[owner] += 1
            request = GenerateRequest(
                id=f"{len(due)}",
                token_ids=[1] * PROMPT,
                sampling=Sampling(max_tokens=TOKENS, ignore_eos=True),
                seed=0,
                owner=owner if keys else "",
                deadline_s=clock.now + TIMEOUT_S,
            )
            try:
                admission.admit(Demand.of([request]))
            except (QueueFull, Overloaded):
                ends.refused[owner] += 1
                continue
            who[request.id] = owner
            admission.open([request])
            scheduler.submit([Sequence(request, SamplingState(request, 50, []), 4)])
        outputs, emitted = scheduler.expire(), 0
        if batch := scheduler.next_batch():
            scheduler.launched(batch, 0)
            emissions = [
                Emission([1], [0.0]) if chunk.samples else Emission() for chunk in batch.chunks
            ]
            emitted = sum(len(emission.tokens) for emission in emissions)
            outputs += scheduler.commit(batch, emissions)
        clock.now += STEP_S
        cycle = Cycle(
            context=StepContext(emitted, 0, 10.0, 0),
            strategy=OFF,
            rows=emitted,
            emitted=emitted,
            accepted=(),
            drafted=0,
            step_s=STEP_S,
        )
        admission.stepped(cycle, scheduler.gauges()["waiting"])
        for output in outputs:
            admission.take(output)
            if output.finish_reason == "length":
                ends.done[who[output.id]] += 1
        admission.check()
    return ends


def test_small_tenants_are_fully_served_next_to_a_greedy_one() -> None:
    ends = simulate(keys=True)
    assert ends.share(SMALL) >= 0.99, ends
    assert min(ends.share([owner]) for owner in SMALL) >= 0.95, ends
    assert not any(ends.refused[owner] for owner in SMALL), "only the greedy key is refused"
    assert ends.done.total() >= 0.85 * CAPACITY * 20, "and the engine is as busy as before"


def test_without_keys_all_requests_are_of_one_tenant() -> None:
    ends = simulate(keys=False)
    assert abs(ends.share(SMALL) - ends.share(["greedy"])) < 0.1, ends
    assert ends.share(SMALL) < 0.5
