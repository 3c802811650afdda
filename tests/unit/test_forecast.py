"""Forecasts: what they learn from, and what they refuse as too late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.test_admission import ENGINE, Clock, experienced, make, output, sequences, step
from tlt_server.errors import Overloaded, QueueFull
from tlt_server.frontend.link.admission import CAUTION, Demand
from tlt_server.frontend.link.forecast import MIN_S, MIN_SEQUENCES
from tlt_server.wire.records import StepOutput


def test_full_queue_refusal_forecasts_when_to_retry() -> None:
    admission = experienced(make(max_queue=20))
    # 50 tokens each, half of them expected: 500 in all, 100 a second.
    admission.open(sequences(range(20)))
    with pytest.raises(QueueFull) as caught:
        admission.admit(Demand(8))
    assert caught.value.retry_after_s == pytest.approx(8 / 20 * 5)


def test_no_wait_is_forecast_without_evidence() -> None:
    admission = make()
    for _ in range(MIN_SEQUENCES):
        admission.forecast.ended(25, 50)
    for _ in range(100):
        admission.stepped(step(4, 10, MIN_S), waiting=0)  # not full: says nothing
    admission.open(sequences(range(50)))
    admission.admit(Demand(1, 10, 50, deadline_s=0.001))
    assert not admission.forecast.known and admission.wait_s() == 0


def test_forecast_that_refuses_every_request_can_recover() -> None:
    admission = experienced(make(), tokens_per_s=10)
    admission.open(sequences(range(8)))  # every place is taken and none waits
    asked = Demand(1, 10, 50, deadline_s=5.0)
    with pytest.raises(Overloaded):
        admission.admit(asked)
    for _ in range(300):
        admission.stepped(step(8, 20, 0.1), waiting=0)
    admission.admit(asked)


def test_forecast_wait_is_queued_work_over_the_full_step_rate() -> None:
    admission = experienced(make())
    admission.open(sequences(range(7)))
    assert admission.wait_s() == 0  # the eighth place is free
    admission.open(sequences("x"))
    # One of eight must end: 25 tokens at 100 a second.
    assert admission.wait_s() == pytest.approx(0.25)
    admission.open(sequences("yz"))
    assert admission.wait_s() == pytest.approx(0.75)


def test_forecast_running_sequences_are_bounded_by_pages() -> None:
    admission = experienced(make(engine=ENGINE_OF_10_PAGES))
    # Each 16 + half of 32 tokens and half a page: 2.5 pages.
    admission.open(sequences(range(4), prompt=16, max_tokens=32))
    assert admission.wait_s() == pytest.approx(16 / 100)
    admission.close("0")
    assert admission.wait_s() == 0


ENGINE_OF_10_PAGES = replace(ENGINE, pages=10)


def test_hopeless_deadline_is_refused_with_the_time_to_retry() -> None:
    clock = Clock()
    admission = experienced(make(clock=clock))
    # 9 must end first: 2.25 s; a sequence gets 12.5 tokens a second: 2 s for its own 25.
    admission.open(sequences(range(16)))
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


def test_request_forecast_to_start_too_late_is_refused() -> None:
    admission = experienced(make())
    admission.open(sequences(range(16)))
    with pytest.raises(
        Overloaded, match=r"would begin after 3\.4 s, and it has 2\.0 s \(queue_timeout_s\)"
    ):
        admission.admit(Demand(1, 10, 50, begin_by_s=2.0))
    # All of a batch must begin in time, its ninth after 2.25 + 2 s.
    with pytest.raises(Overloaded, match="queue_timeout_s"):
        admission.admit(Demand(9, 90, 450, begin_by_s=CAUTION * 4.2))
    admission.admit(Demand(9, 90, 450, begin_by_s=CAUTION * 4.3))


def test_idle_server_refuses_no_request_for_its_length() -> None:
    admission = experienced(make())
    admission.admit(Demand(90, 900, 4500, deadline_s=0.1))
    admission.open(sequences(range(8)))
    with pytest.raises(Overloaded) as caught:
        admission.admit(Demand(90, 900, 4500, deadline_s=0.1))
    # It lacks much more, but then the wait for others is over.
    assert caught.value.retry_after_s == 1


def test_forecast_accounts_for_long_sequences() -> None:
    forecast = make().forecast
    for i in range(400):
        forecast.ended(90 if i % 10 == 0 else 10, 100)
    assert forecast.share == pytest.approx(0.18, abs=0.05)
    assert 0.5 < forecast.long_share <= 1
    for _ in range(2000):
        forecast.ended(30, 100)
    assert forecast.share == pytest.approx(0.3, abs=0.01)
    assert forecast.long_share == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        (output("a", 3, "stop"), True),
        (output("a", 3, "length"), True),
        (output("a", 0, "error", error=("deadline_exceeded", "")), True),
        (output("a", 3, "abort"), False),
        (output("a", 0, "error", ("engine_failed", "")), False),
        (output("a", 0, "error", ("queue_timeout", "")), False),
    ],
)
def test_forecast_learns_only_from_natural_sequence_ends(last: StepOutput, counts: bool) -> None:
    admission = make()
    for _ in range(MIN_SEQUENCES):
        admission.open(sequences("a"))
        admission.take(output("a", 7))
        admission.take(last)
    assert (admission.forecast.share > 0) == counts and len(admission) == 0
