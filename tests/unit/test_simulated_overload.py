"""Admission in a simulated overload: goodput in virtual time, with and without the forecast."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from msgspec.structs import replace

from tests.unit.test_admission import ENGINE, Clock, make, output, sequences, step
from tlt_server.errors import TltError
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.wire.records import GenerateRequest

pytestmark = pytest.mark.slow  # simulates minutes of load


class SimulatedEngine:
    """One token per running sequence and step, first come first served, in virtual time; a fuller
    step takes longer.
    """

    def __init__(self, admission: Admission, clock: Clock, seed: int) -> None:
        self.admission, self.clock, self.draw = admission, clock, random.Random(seed)
        self.waiting: deque[GenerateRequest] = deque()
        self.running: dict[str, list[int]] = {}  # id -> tokens given, tokens in all
        self.deadlines: dict[str, float] = {}
        self.good = self.late = self.refused = 0  # tokens, sequences, sequences

    def ask(self, id: int, timeout_s: float) -> None:
        [request] = sequences([id], 50, 256, deadline_s=self.clock.now + timeout_s)
        try:
            self.admission.admit(Demand.of([request]))
        except TltError:
            self.refused += 1
        else:
            self.admission.open([request])
            self.waiting.append(request)
            self.deadlines[request.id] = self.clock.now + timeout_s

    def step(self) -> None:
        new = 0
        while self.waiting and len(self.running) < 64:
            length = min(256, max(1, int(self.draw.lognormvariate(4.2, 0.9))))
            self.running[self.waiting.popleft().id] = [0, length]
            new += 1
        step_s = 0.004 + 0.0002 * len(self.running) + 0.0005 * new
        self.clock.now += step_s
        for id, sequence in list(self.running.items()):
            sequence[0] += 1
            ended = sequence[0] == sequence[1]
            self.admission.take(output(id, 1, "stop" if ended else None))
            if ended:
                self.good += sequence[1]
                self._gone(id)
        for id in [id for id, deadline_s in self.deadlines.items() if deadline_s <= self.clock.now]:
            self.late += 1
            self.admission.take(output(id, 0, "error", ("deadline_exceeded", "")))
            self._gone(id)
        if self.running:
            self.admission.stepped(
                step(len(self.running), len(self.running), step_s), len(self.waiting)
            )

    def _gone(self, id: str) -> None:
        self.running.pop(id, None)
        self.waiting = deque(request for request in self.waiting if request.id != id)
        del self.deadlines[id]


def simulated(timeout_s: float, per_s: float, seconds: float, seed: int = 0) -> SimulatedEngine:
    """`per_s` requests a second at random moments; inf: as many as are needed to keep it full."""
    clock, places = Clock(), ENGINE_OF_64
    engine = SimulatedEngine(
        make(
            max_queue=10**6,
            max_queue_tokens=10**9,
            max_page_forecast=1e6,
            engine=places,
            clock=clock,
        ),
        clock,
        seed,
    )
    draw, next_s, count = random.Random(seed + 1), 0.0, 0
    while clock.now < seconds:
        while len(engine.deadlines) < 96 if math.isinf(per_s) else next_s <= clock.now:
            count += 1
            engine.ask(count, timeout_s)
            next_s += 0.0 if math.isinf(per_s) else draw.expovariate(per_s)
        engine.step()
    return engine


ENGINE_OF_64 = replace(ENGINE, max_running=64, pages=10**6)


MEAN = 92  # tokens of a simulated sequence


@pytest.fixture(scope="module")
def peak() -> float:
    """Tokens per second of a server that is kept full and refuses nothing."""
    return simulated(1e9, math.inf, 60).good / 60


@pytest.mark.parametrize("timeout_s", [5.0, 10.0, 20.0])
@pytest.mark.parametrize("factor", [2, 3])
def test_overload_beyond_capacity_costs_little_goodput(
    peak: float, timeout_s: float, factor: int
) -> None:
    """The loss is of the first seconds, before anything is known. A sequence of full length takes
    4.4 s of its time.
    """
    engine = simulated(timeout_s, factor * peak / MEAN, 60)
    ended = factor * peak / MEAN * 60 - engine.refused
    assert engine.good / 60 >= 0.95 * peak
    assert engine.late <= 0.02 * ended


def test_without_the_forecast_goodput_collapses(
    peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow twin: what the same load does to a server that only bounds its queue."""
    monkeypatch.setattr(Admission, "_check_time", lambda self, demand: None)
    engine = simulated(10.0, 3 * peak / MEAN, 60)
    assert engine.good / 60 < 0.6 * peak and engine.late > 2000
