"""Admission: bounds that are never passed, forecasts that turn away what would be late, and a
simulated overload in virtual time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.errors import Overloaded, QueueFull, TltError, TooLarge
from tlt_server.events import EngineInfo
from tlt_server.frontend.link.admission import CAUTION, Admission, Demand
from tlt_server.frontend.link.forecast import MIN_S, MIN_SEQUENCES
from tlt_server.records import OFF, Cycle, GenerateRequest, Sampling, StepContext, StepOutput

ENGINE = EngineInfo(
    model="m",
    weight_version="v0",
    vocab_size=300,
    max_model_len=4096,
    eos_token_ids=[0],
    pages=1000,
    page_size=16,
    max_running=8,
    drafter="",
    policy="off",
    numerics="strict",
    attention="none",
    dtype="float32",
    device="cpu",
    threads=1,
    phases={},
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    *,
    max_queue: int = 100,
    max_queue_tokens: int = 10_000,
    max_page_forecast: float = 4.0,
    engine: EngineInfo | None = ENGINE,
    clock: Clock | None = None,
) -> Admission:
    admission = Admission(
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        max_page_forecast=max_page_forecast,
        clock=clock or Clock(),
    )
    admission.engine = engine
    return admission


def sequences(
    ids: Iterable[object],
    prompt: int = 10,
    max_tokens: int = 50,
    deadline_s: float | None = None,
    begin_by_s: float | None = None,
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=str(id),
            token_ids=[1] * prompt,
            sampling=Sampling(max_tokens=max_tokens),
            seed=0,
            deadline_s=deadline_s,
            begin_by_s=begin_by_s,
        )
        for id in ids
    ]


def output(
    id: object, tokens: int, finish_reason: str | None = None, error: tuple[str, str] | None = None
) -> StepOutput:
    return StepOutput(
        id=str(id),
        token_ids=[1] * tokens,
        logprobs=[0.0] * tokens,
        finish_reason=finish_reason,
        error=error,
    )


def step(decoding: int, emitted: int, step_s: float) -> Cycle:
    return Cycle(
        context=StepContext(decoding, 0, 10.0, 0),
        strategy=OFF,
        rows=decoding,
        emitted=emitted,
        accepted=(),
        drafted=0,
        step_s=step_s,
    )


def experienced(
    admission: Admission, *, tokens_per_s: float = 100.0, running: int = 8, share: float = 0.5
) -> Admission:
    """Return an admission that has seen full steps, and sequences that used this share of
    max_tokens.
    """
    for _ in range(100):
        admission.stepped(step(running, int(tokens_per_s / 10), 0.1), waiting=1)
    for _ in range(MIN_SEQUENCES):
        admission.forecast.ended(int(100 * share), 100)
    return admission


@pytest.mark.parametrize(
    ("limits", "opened", "asked", "says"),
    [
        (
            {"max_queue": 10},
            sequences("abcdefgh"),
            Demand(3),
            r"8 sequences are open and 3 more are over the limit of 10 \(max_queue\)",
        ),
        (
            {"max_queue_tokens": 200},
            sequences("ab"),
            Demand(1, 31, 50),
            r"120 tokens are open and 81 more are over the limit of 200 \(max_queue_tokens\)",
        ),
        (
            {"max_page_forecast": 0.01},
            sequences("ab", prompt=32),
            Demand(2, 100),
            r"5 KV pages are open .* of 10 \(max_page_forecast, x 1000",
        ),
    ],
)
def test_what_does_not_fit_next_to_the_open_ones_is_429(
    limits: dict[str, float], opened: list[GenerateRequest], asked: Demand, says: str
) -> None:
    admission = make(**limits)  # type: ignore[arg-type]
    admission.admit(asked)
    admission.open(opened)
    with pytest.raises(QueueFull, match=says) as caught:
        admission.admit(asked)
    assert (
        caught.value.http_status == 429 and caught.value.retry_after_s == 1
    )  # nothing is known yet


@pytest.mark.parametrize(
    ("limits", "asked", "says"),
    [
        (
            {"max_queue": 10},
            Demand(11),
            r"11 sequences \(items x n\); the limit is 10 \(max_queue\): split it",
        ),
        (
            {"max_queue_tokens": 200},
            Demand(1, 1, 200),
            r"201 tokens \(prompt \+ max_tokens\); the limit is 200 \(max_queue_tokens\): split it",
        ),
    ],
)
def test_what_could_never_fit_is_413(limits: dict[str, float], asked: Demand, says: str) -> None:
    with pytest.raises(TooLarge, match=says) as caught:
        make(**limits).admit(asked)  # type: ignore[arg-type]
    assert caught.value.http_status == 413 and not caught.value.retryable


def test_alone_a_request_passes_every_forecast() -> None:
    admission, many = make(max_page_forecast=0.01), Demand(1, 200)  # 13 pages, of 10
    admission.admit(many)
    admission.open(sequences(["small"]))
    with pytest.raises(
        QueueFull, match=r"13 more are over the limit of 10 \(max_page_forecast, x 1000 pages\)"
    ):
        admission.admit(many)


def test_a_full_queue_says_when_it_should_have_room() -> None:
    admission = experienced(make(max_queue=20))
    admission.open(
        sequences(range(20))
    )  # 50 tokens each, half of them expected: 500 in all, 100 a second
    with pytest.raises(QueueFull) as caught:
        admission.admit(Demand(8))
    assert caught.value.retry_after_s == pytest.approx(8 / 20 * 5)


def test_nothing_is_forecast_without_evidence() -> None:
    admission = make()
    for _ in range(MIN_SEQUENCES):
        admission.forecast.ended(25, 50)
    for _ in range(100):
        admission.stepped(step(4, 10, MIN_S), waiting=0)  # not full: says nothing
    admission.open(sequences(range(50)))
    admission.admit(Demand(1, 10, 50, deadline_s=0.001))
    assert not admission.forecast.known and admission.wait_s() == 0


def test_a_forecast_that_refuses_all_that_would_wait_can_still_learn_better() -> None:
    admission = experienced(make(), tokens_per_s=10)
    admission.open(sequences(range(8)))  # every place is taken and none waits
    asked = Demand(1, 10, 50, deadline_s=5.0)
    with pytest.raises(Overloaded):
        admission.admit(asked)
    for _ in range(300):
        admission.stepped(step(8, 20, 0.1), waiting=0)
    admission.admit(asked)


def test_a_wait_is_what_must_end_first_at_the_rate_of_full_steps() -> None:
    admission = experienced(make())
    admission.open(sequences(range(7)))
    assert admission.wait_s() == 0  # the eighth place is free
    admission.open(sequences("x"))
    assert admission.wait_s() == pytest.approx(
        0.25
    )  # one of eight must end: 25 tokens at 100 a second
    admission.open(sequences("yz"))
    assert admission.wait_s() == pytest.approx(0.75)


def test_places_are_also_bounded_by_pages() -> None:
    admission = experienced(make(engine=ENGINE_OF_10_PAGES))
    admission.open(
        sequences(range(4), prompt=16, max_tokens=32)
    )  # each 16 + half of 32 tokens and half a page: 2.5 pages
    assert admission.wait_s() == pytest.approx(16 / 100)
    admission.close("0")
    assert admission.wait_s() == 0


ENGINE_OF_10_PAGES = EngineInfo(
    **{f: getattr(ENGINE, f) for f in ENGINE.__struct_fields__} | {"pages": 10}
)


def test_what_would_miss_its_deadline_is_refused_with_the_time_after_which_it_would_not() -> None:
    clock = Clock()
    admission = experienced(make(clock=clock))
    admission.open(
        sequences(range(16))
    )  # 9 must end first: 2.25 s; a sequence gets 12.5 tokens a second: 2 s for its own 25
    needs_s = CAUTION * (2.25 + 2)
    asked = Demand(1, 10, 50)
    with pytest.raises(
        Overloaded, match=r"would have ended after 6\.4 s, and it has 6\.0 s \(timeout_s\)"
    ) as caught:
        admission.admit(asked._replace(deadline_s=6.0))
    assert caught.value.http_status == 429 and caught.value.retry_after_s == 1
    with pytest.raises(Overloaded) as caught:
        admission.admit(asked._replace(deadline_s=needs_s - 1.5))
    assert caught.value.retry_after_s == pytest.approx(1.5)
    admission.admit(asked._replace(deadline_s=needs_s + 0.01))
    clock.now = 1.0
    with pytest.raises(Overloaded):
        admission.admit(asked._replace(deadline_s=needs_s + 0.01))


def test_what_would_not_begin_in_time_is_refused() -> None:
    admission = experienced(make())
    admission.open(sequences(range(16)))
    with pytest.raises(
        Overloaded, match=r"would begin after 3\.4 s, and it has 2\.0 s \(queue_timeout_s\)"
    ):
        admission.admit(Demand(1, 10, 50, begin_by_s=2.0))
    with pytest.raises(
        Overloaded, match="queue_timeout_s"
    ):  # all of a batch must begin in time, its ninth after 2.25 + 2 s
        admission.admit(Demand(9, 90, 450, begin_by_s=CAUTION * 4.2))
    admission.admit(Demand(9, 90, 450, begin_by_s=CAUTION * 4.3))


def test_an_idle_server_refuses_nothing_for_its_length() -> None:
    admission = experienced(make())
    admission.admit(Demand(90, 900, 4500, deadline_s=0.1))
    admission.open(sequences(range(8)))
    with pytest.raises(Overloaded) as caught:
        admission.admit(Demand(90, 900, 4500, deadline_s=0.1))
    assert (
        caught.value.retry_after_s == 1
    )  # it lacks much more, but then the wait for others is over


def test_long_sequences_are_reckoned_with() -> None:
    forecast = make().forecast
    for i in range(400):
        forecast.ended(90 if i % 10 == 0 else 10, 100)
    assert forecast.share == pytest.approx(0.18, abs=0.05)
    assert 0.5 < forecast.long_share <= 1
    for _ in range(2000):
        forecast.ended(30, 100)
    assert forecast.share == pytest.approx(0.3, abs=0.01) and forecast.long_share == pytest.approx(
        0.3, abs=0.03
    )


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        (output("a", 3, "stop"), True),
        (output("a", 3, "length"), True),
        (output("a", 0, "error", ("deadline_exceeded", "")), True),
        (output("a", 3, "abort"), False),
        (output("a", 0, "error", ("engine_failed", "")), False),
        (output("a", 0, "error", ("queue_timeout", "")), False),
    ],
)
def test_only_ends_that_say_how_long_sequences_are_teach(last: StepOutput, counts: bool) -> None:
    admission = make()
    for _ in range(MIN_SEQUENCES):
        admission.open(sequences("a"))
        admission.take(output("a", 7))
        admission.take(last)
    assert (admission.forecast.share > 0) == counts and len(admission) == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_queue=st.integers(1, 30),
    max_queue_tokens=st.integers(20, 2000),
    max_page_forecast=st.floats(0.01, 2),
    steps=st.integers(1, 120),
)
def test_no_bound_is_ever_passed_and_everything_returns_to_zero(
    seed: int, max_queue: int, max_queue_tokens: int, max_page_forecast: float, steps: int
) -> None:
    draw, admission, count = (
        random.Random(seed),
        make(
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
            max_page_forecast=max_page_forecast,
        ),
        0,
    )
    twin: dict[str, tuple[int, int]] = {}  # the slow twin: what is open, summed each time
    for _ in range(steps):
        match draw.choice(["open", "open", "give", "end", "leave", "step"]):
            case "open":
                batch = sequences(
                    range(count, count + draw.randint(1, 6)),
                    draw.randint(1, 40),
                    draw.randint(1, 90),
                    deadline_s=draw.choice([None, 0.5, 5.0]),
                    begin_by_s=draw.choice([None, 0.5, 5.0]),
                )
                count += len(batch)
                fits = (
                    len(twin) + len(batch) <= max_queue
                    and sum(map(sum, twin.values()))
                    + sum(len(r.token_ids) + r.sampling.max_tokens for r in batch)
                    <= max_queue_tokens
                )
                try:
                    admission.admit(Demand.of(batch))
                except Overloaded as error:
                    assert fits and admission.wait_s() > 0 and (error.retry_after_s or 0) >= 1
                except QueueFull as error:
                    assert len(twin) and (error.retry_after_s or 0) >= 1
                except TooLarge:
                    pass
                else:
                    assert fits
                    admission.open(batch)
                    twin.update((r.id, (len(r.token_ids), r.sampling.max_tokens)) for r in batch)
                    assert admission.pages <= max_page_forecast * ENGINE.pages * (1 + 1e-9) or len(
                        twin
                    ) == len(batch), "a batch larger than the limit runs alone"
            case "give" if twin:
                admission.take(output(draw.choice(list(twin)), draw.randint(1, 5)))
            case "end" if twin:
                id = draw.choice(list(twin))
                del twin[id]
                admission.take(
                    output(id, draw.randint(0, 5), draw.choice(["stop", "length", "abort"]))
                )
            case "leave" if twin:
                id = draw.choice(list(twin))
                del twin[id]
                admission.close(id)
            case "step":
                admission.stepped(
                    step(8, draw.randint(0, 20), draw.random()), waiting=draw.choice([0, 3])
                )
        admission.check()
        assert (len(admission), admission.prompt_tokens, admission.output_tokens) == (
            len(twin),
            sum(prompt for prompt, _ in twin.values()),
            sum(most for _, most in twin.values()),
        )
    for id in twin:
        admission.close(id)
    admission.check()
    assert (
        len(admission) == admission.tokens == 0 and admission.pages == 0 and admission.wait_s() == 0
    )


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


ENGINE_OF_64 = EngineInfo(
    **{f: getattr(ENGINE, f) for f in ENGINE.__struct_fields__}
    | {"max_running": 64, "pages": 10**6}
)


MEAN = 92  # tokens of a simulated sequence


@pytest.fixture(scope="module")
def peak() -> float:
    """Tokens per second of a server that is kept full and refuses nothing."""
    return simulated(1e9, math.inf, 60).good / 60


@pytest.mark.parametrize("timeout_s", [5.0, 10.0, 20.0])
@pytest.mark.parametrize("factor", [2, 3])
def test_more_than_the_capacity_costs_hardly_any_goodput(
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


def test_a_prompt_that_is_only_scored_teaches_nothing() -> None:
    admission = Admission(max_queue=8, max_queue_tokens=1000, max_page_forecast=4)
    share = admission.forecast.share
    request = GenerateRequest(id="a", token_ids=[1, 2], sampling=Sampling(max_tokens=0), seed=0)
    admission.open([request])
    admission.take(StepOutput(id="a", token_ids=[], logprobs=[], finish_reason="length"))
    admission.check()
    assert len(admission) == 0 and admission.forecast.share == share
