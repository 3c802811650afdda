"""Figures of replayed cycles, on cycles that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.sampled import samples
from tlt_server.speculation.cost import KNOTS, CostModel, CostRecord
from tlt_server.trainer.judging import figures
from tlt_server.trainer.judging.figures import ByResponse
from tlt_server.trainer.replaying.evaluate import Walked
from tlt_server.trainer.replaying.plans import RecordedPlan
from tlt_server.wire.records import OFF, Strategy


def walked(*cycles: tuple[int, int, int, int]) -> Walked:
    """Cycles of (response, root, accepted, emitted)."""
    response_C, root_C, accepted_C, emitted_C = np.array(cycles, np.int32).T
    zeros_C = np.zeros(len(cycles), np.int32)
    return Walked(response_C, root_C, zeros_C, zeros_C + 4, accepted_C, emitted_C)


def test_a_last_cycle_counts_the_tokens_left() -> None:
    found = walked((0, 3, 2, 3), (1, 2, 2, 2))
    assert figures.accept_length(found) == 2.5
    assert figures.by_depth(found, 3) == [1, 1, 0]
    assert figures.by_length(found, samples().responses) == [(3, 2.0), (4, 3.0)]
    assert figures.by_kind(found, ["a", "b"]) == {"a": 3.0, "b": 2.0}


def test_coverage_is_of_output_tokens() -> None:
    assert figures.coverage(samples().responses, [0], np.array([1, 2, 10, 12])) == 0.5


def test_cycle_takes_the_time_of_its_batch() -> None:
    cost = CostModel()
    cost.restore(
        CostRecord(
            extend=[1e-3 * k for k in KNOTS],
            start={"eagle": [2e-4] * len(KNOTS)},
            draft={"eagle": [1e-4] * len(KNOTS)},
            linear=[0, 0, 0],
        )
    )
    found = figures.cycle_ms(walked((0, 3, 2, 3)), [Strategy("eagle", 3, 1, 4)], cost, 2)
    assert found == pytest.approx([8 + 0.2 + 0.3], rel=1e-2)  # a request's own time is above 0


def test_mean_times_are_known_only_where_those_of_cycles_are() -> None:
    found = walked((0, 3, 2, 3), (0, 6, 3, 4))
    assert figures.mean_ms(found, np.array([6.0, 8.0])) == (7.0, 2.0)
    assert figures.mean_ms(found, None) == (None, None)
    assert figures.mean_ms(Walked.joined([]), np.zeros(0)) == (None, None)


def sums(cycles: list[int], tokens: list[int]) -> ByResponse:
    counts = np.array(cycles)
    return ByResponse(np.arange(len(cycles)), counts, np.array(tokens), 2.0 * counts)


def test_drafters_are_compared_response_by_response() -> None:
    base = sums([10, 20, 30, 40], [40, 80, 90, 160])
    other = sums([8, 16, 24, 32], [40, 80, 90, 160])
    found = figures.paired(base, other, np.arange(4, dtype=np.int32))
    assert found.cycles_saved == pytest.approx((0.2, 0.2, 0.2))
    assert found.time_saved == pytest.approx((0.2, 0.2, 0.2))
    assert found.accept_length.value == pytest.approx(370 / 80 - 3.7)
    assert found.per_response.low <= found.per_response.value <= found.per_response.high
    unknown = base._replace(ms_N=np.full(4, np.nan))
    assert figures.paired(unknown, other, np.arange(4, dtype=np.int32)).time_saved is None


def test_siblings_widen_an_interval() -> None:
    random = np.random.default_rng(0)
    base = sums([20] * 64, [80] * 64)
    other = sums((18 + random.integers(-4, 5, 8).repeat(8)).tolist(), [80] * 64)
    apart = figures.paired(base, other, np.arange(64, dtype=np.int32)).cycles_saved
    together = figures.paired(base, other, np.arange(8, dtype=np.int32).repeat(8)).cycles_saved
    assert together.high - together.low > 1.5 * (apart.high - apart.low)


def test_a_plan_as_recorded_takes_the_last_root_before() -> None:
    """Response 0 has the roots 3 (nothing drafted) and 4 (5 own rows), response 1 the root 2."""
    given = samples()
    assert given.legend.strategies[0] == OFF
    plan = RecordedPlan(given.legend.strategies, given.verified, "eagle")
    found = plan.at(np.array([0, 0, 0, 1, 1]), np.array([3, 4, 5, 2, 1]))
    assert found.rows_B.tolist() == [0, 5, 5, 6, 0]
    assert found.strategy_B.tolist()[1:4] == [1, 1, 1]
    assert found.next_B.tolist()[0] == 4 and found.next_B.tolist()[4] == 2
