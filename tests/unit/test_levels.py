"""The level of a step against its promise, counted row by row, and the fit of a step's time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.schedule.step_cost import StepCost, StepLine
from tlt_server.engine.schedule.time_shares import LEAST, SLOWER, OwnerRows, fair_level

ROWS = st.builds(OwnerRows, st.integers(0, 40), st.integers(0, 90)).filter(
    lambda rows: rows.total > 0
)


def time_ms(line: StepLine, wanted: list[OwnerRows], level: int) -> float:
    cut = [rows.cut(level) if rows.total > level else rows for rows in wanted]
    return line.ms(sum(rows.decoding for rows in cut), sum(rows.prompt for rows in cut))


@given(
    st.lists(st.tuples(ROWS, st.floats(0, 1)), min_size=2, max_size=7),
    st.floats(0, 20),
    st.floats(0.01, 1),
)
def test_owners_below_the_level_slow_down_at_most_as_promised(
    owners: list[tuple[OwnerRows, float]], fixed: float, per_row: float
) -> None:
    wanted, line = [rows for rows, _ in owners], StepLine(per_row, per_row, fixed)
    level = fair_level(wanted, [used for _, used in owners], line)
    if level is None:
        below = [rows for rows in wanted if rows.total < max(rows.total for rows in wanted)]
        without = time_ms(line, below, 10**6)
        slower = max(SLOWER, len(wanted) / max(1, len(below)))
        assert not below or time_ms(line, wanted, 10**6) <= 1.001 * slower * without
        return
    below = [rows for rows in wanted if rows.total <= level]
    assert below, "an owner has all its rows"
    used = min(1.0, sum(used for rows, used in owners if rows.total <= level))
    slower = max(LEAST, used * max(SLOWER, len(wanted) / len(below)))
    limit_ms = 1.001 * slower * time_ms(line, below, level)
    largest = max(rows.total for rows in below)
    assert time_ms(line, wanted, level) <= limit_ms or level == largest
    assert time_ms(line, wanted, level + 1) > limit_ms / 1.002, "it is no lower than it must be"


@given(ROWS, st.integers(1, 100))
def test_limited_owner_keeps_decode_and_prompt_rows(rows: OwnerRows, level: int) -> None:
    cut = rows.cut(level)
    assert cut.total == min(level, rows.total)
    assert 0 <= cut.decoding <= rows.decoding and 0 <= cut.prompt <= rows.prompt
    if level > 1:
        assert (cut.decoding > 0) == (rows.decoding > 0) and (cut.prompt > 0) == (rows.prompt > 0)


@given(ROWS, st.integers(2, 6), st.floats(0, 20), st.floats(0, 1))
def test_owners_with_equal_demand_are_not_limited(
    rows: OwnerRows, owners: int, fixed: float, used: float
) -> None:
    assert fair_level([rows] * owners, [used] * owners, StepLine(1.0, 1.0, fixed)) is None


def test_busy_tenant_gets_half_a_step_and_rare_tenant_more() -> None:
    wanted, line = [OwnerRows(1, 0), OwnerRows(64, 0)], StepLine(0.2, 0.2, 2.8)
    assert fair_level(wanted, [1.0, 1.0], line) == 15  # 6 ms: twice those of one row
    assert fair_level(wanted, [0.1, 1.0], line) == 3
    assert fair_level(wanted, [1.0, 1.0], StepLine(0.013, 0.013, 3.85)) is None


@pytest.mark.parametrize("parts", [(0.18, 0.2, 2.8), (0.013, 0.02, 3.85), (0.5, 0.1, 0.0)])
def test_step_time_line_is_learned_from_steps(parts: tuple[float, float, float]) -> None:
    cost, draw = StepCost(), random.Random(3)
    for _ in range(400):
        decoding, prompt = draw.randint(0, 64), draw.choice([0, 0, draw.randint(0, 512)])
        ms = parts[0] * decoding + parts[1] * prompt + parts[2]
        cost.observe(decoding, prompt, ms * draw.uniform(0.9, 1.1))
    for decoding, prompt in [(1, 0), (8, 0), (64, 0), (1, 20), (0, 400), (30, 300)]:
        ms = parts[0] * decoding + parts[1] * prompt + parts[2]
        assert cost.line().ms(decoding, prompt) == pytest.approx(ms, rel=0.2)


def test_single_step_time_is_attributed_to_rows_at_first() -> None:
    cost = StepCost()
    assert cost.line().ms(1, 0) == 0.0
    cost.observe(0, 256, 48.9)
    assert cost.line().ms(1, 0) < 1.0, "so that steps are cut and their fixed part is seen"
    cost.observe(2, 0, 3.16)
    assert cost.line().ms(1, 0) == pytest.approx(2.98, rel=0.05)


def test_one_slow_step_barely_counts_but_a_slow_machine_does() -> None:
    cost = StepCost()
    for rows in [1, 64] * 40:
        cost.observe(rows, 0, 3 + 0.2 * rows)
    cost.observe(1, 0, 1000.0)
    assert cost.line().ms(1, 0) < 1.4 * 3.2
    for rows in [1, 64] * 40:
        cost.observe(rows, 0, 2 * (3 + 0.2 * rows))
    assert cost.line().ms(1, 0) == pytest.approx(6.4, rel=0.05)
