"""Admission: bounds that are never passed, and sums that return to zero."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.frontend.fake_engine import INFO
from tlt_server.errors import Overloaded, QueueFull, TooLarge
from tlt_server.frontend.link.admission import Admission, Demand
from tlt_server.frontend.link.forecast import MIN_SEQUENCES
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, Sampling, StepContext, StepOutput

ENGINE = replace(INFO, max_model_len=4096, pages=1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    *, engine: EngineInfo | None = ENGINE, clock: Clock | None = None, **limits: float
) -> Admission:
    limits = {"max_queue": 100, "max_queue_tokens": 10_000, "max_page_forecast": 4.0} | limits
    admission = Admission(**limits, clock=clock or Clock())  # type: ignore[arg-type]
    admission.engine = engine
    return admission


def sequences(
    ids: Iterable[object], prompt: int = 10, max_tokens: int = 50, **fields: Any
) -> list[GenerateRequest]:
    asked = {"token_ids": [1] * prompt, "sampling": Sampling(max_tokens=max_tokens), "seed": 0}
    return [GenerateRequest(id=str(id), **asked, **fields) for id in ids]


def output(
    id: object, tokens: int, finish_reason: str | None = None, error: tuple[str, str] | None = None
) -> StepOutput:
    said = {"token_ids": [1] * tokens, "logprobs": [0.0] * tokens}
    return StepOutput(id=str(id), **said, finish_reason=finish_reason, error=error)


def step(decoding: int, emitted: int, step_s: float) -> Cycle:
    counts = {"rows": decoding, "emitted": emitted, "accepted": (), "drafted": 0}
    context = StepContext(decoding, 0, 10.0, 0)
    return Cycle(context=context, strategy=OFF, **counts, step_s=step_s)


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
def test_request_that_does_not_fit_next_to_open_ones_is_a_429(
    limits: dict[str, float], opened: list[GenerateRequest], asked: Demand, says: str
) -> None:
    admission = make(**limits)  # type: ignore[arg-type]
    admission.admit(asked)
    admission.open(opened)
    with pytest.raises(QueueFull, match=says) as caught:
        admission.admit(asked)
    assert caught.value.http_status == 429
    assert caught.value.retry_after_s == 1, "nothing is known yet"


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
def test_request_that_could_never_fit_is_a_413(
    limits: dict[str, float], asked: Demand, says: str
) -> None:
    with pytest.raises(TooLarge, match=says) as caught:
        make(**limits).admit(asked)  # type: ignore[arg-type]
    assert caught.value.http_status == 413 and not caught.value.retryable


def test_lone_request_passes_every_forecast() -> None:
    admission, many = make(max_page_forecast=0.01), Demand(1, 200)  # 13 pages, of 10
    admission.admit(many)
    admission.open(sequences(["small"]))
    with pytest.raises(
        QueueFull, match=r"13 more are over the limit of 10 \(max_page_forecast, x 1000 pages\)"
    ):
        admission.admit(many)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_queue=st.integers(1, 30),
    max_queue_tokens=st.integers(20, 2000),
    max_page_forecast=st.floats(0.01, 2),
    steps=st.integers(1, 120),
)
def test_admission_keeps_its_bounds_and_counts_return_to_zero(
    seed: int, max_queue: int, max_queue_tokens: int, max_page_forecast: float, steps: int
) -> None:
    draw = random.Random(seed)
    admission = make(
        max_queue=max_queue, max_queue_tokens=max_queue_tokens, max_page_forecast=max_page_forecast
    )
    count = 0
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
                asked = {r.id: (len(r.token_ids), r.sampling.max_tokens) for r in batch}
                tokens = sum(map(sum, (twin | asked).values()))
                fits = len(twin) + len(batch) <= max_queue and tokens <= max_queue_tokens
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
                    twin |= asked
                    alone = len(twin) == len(batch)
                    assert alone or admission.pages <= max_page_forecast * ENGINE.pages * (1 + 1e-9)
            case "give" if twin:
                admission.take(output(draw.choice(list(twin)), draw.randint(1, 5)))
            case "end" if twin:
                id = draw.choice(list(twin))
                del twin[id]
                reason = draw.choice(["stop", "length", "abort"])
                admission.take(output(id, draw.randint(0, 5), reason))
            case "leave" if twin:
                id = draw.choice(list(twin))
                del twin[id]
                admission.close(id)
            case "step":
                cycle = step(8, draw.randint(0, 20), draw.random())
                admission.stepped(cycle, waiting=draw.choice([0, 3]))
        admission.check()
        assert len(admission) == len(twin)
        assert admission.all.prompt_tokens == sum(prompt for prompt, _ in twin.values())
        assert admission.all.output_tokens == sum(most for _, most in twin.values())
    for id in twin:
        admission.close(id)
    admission.check()
    assert len(admission) == admission.tokens == admission.pages == admission.wait_s() == 0


def test_scoring_requests_do_not_train_the_forecast() -> None:
    admission = Admission(max_queue=8, max_queue_tokens=1000, max_page_forecast=4)
    share = admission.forecast.share
    request = GenerateRequest(id="a", token_ids=[1, 2], sampling=Sampling(max_tokens=0), seed=0)
    admission.open([request])
    admission.take(StepOutput(id="a", token_ids=[], logprobs=[], finish_reason="length"))
    admission.check()
    assert len(admission) == 0 and admission.forecast.share == share


def test_full_queue_of_one_key_refuses_only_that_keys_requests() -> None:
    admission = experienced(make(max_queue=60, max_queue_tokens=10**6))
    admission.open(sequences(range(60), owner="greedy"))
    admission.admit(Demand(1, owner="small"))
    admission.open(sequences(range(100, 130), owner="small"))
    with pytest.raises(
        QueueFull, match=r"90 sequences are open, 60 of them this key's, and its share is 30 and"
    ) as caught:
        admission.admit(Demand(4, owner="greedy"))
    # 34 of 90 must end, of 25 tokens each at 100 tokens/s: 8.5 s, and others come in meanwhile.
    assert caught.value.retry_after_s == pytest.approx(1.5 * 8.5)
    with pytest.raises(QueueFull, match="30 of them this key's, and its share is 30"):
        admission.admit(Demand(1, owner="small"))
    admission.open(sequences(range(200, 220), owner="another"))
    with pytest.raises(QueueFull):
        admission.admit(Demand(1, owner="another"))
    for id in range(20):
        admission.close(str(id))
    admission.check()
    admission.open(sequences(range(300, 320), owner="third"))
    with pytest.raises(QueueFull, match="110 sequences are open, 0 of them"):
        admission.admit(Demand(11, owner="fourth"))  # within its share, and over twice the limit


def test_forecast_wait_of_a_key_adds_a_share_of_each_other_key() -> None:
    admission = experienced(make(max_queue=1000, max_queue_tokens=10**6))
    admission.open(sequences(range(100), owner="greedy"))
    for id in range(8):
        admission.take(output(id, 1))  # they run, in all 8 slots
    assert admission.wait_s("small") == 0, "the engine makes room for a key within its share"
    assert admission.wait_s("greedy") == pytest.approx((92 + 1) * 25 / 100)
    assert admission.wait_s() == admission.wait_s("greedy")
    admission.open(sequences(range(200, 210), owner="small"))
    # of each key 10 or 11 sequences come first
    assert admission.wait_s("small") == pytest.approx((10 + 11 + 1) * 25 / 100)
    with pytest.raises(Overloaded):
        admission.admit(Demand(1, 10, 50, deadline_s=12.0, owner="greedy"))
    admission.admit(Demand(1, 10, 50, deadline_s=20.0, owner="small"))
