"""A drafter whose acceptance collapses with a change of weights rests until the next one; one that
only varies does not.
"""

from __future__ import annotations

import random

import pytest

from tlt_server.speculation.guard import MAX_JUDGED, MIN_JUDGED, AcceptanceGuard
from tlt_server.wire.records import OFF, Cycle, StepContext, Strategy

EAGLE, SMALL = Strategy("eagle", 7, 1, 8), Strategy("eagle", 2, 1, 3)
PAST, LONG = Strategy("history", 2, 1, 3), Strategy("history", 7, 1, 16)


def run(
    guard: AcceptanceGuard,
    share: float,
    steps: int,
    *,
    batch: int = 4,
    seed: int = 0,
    strategy: Strategy = EAGLE,
    refusing: int = 0,
    bound: int = 0,
) -> int:
    """The step in which the drafter collapsed; 0: in none."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        accepted = tuple(rng.randint(1, 7) if rng.random() < share else 0 for _ in range(batch))
        context = StepContext(
            decoding=batch,
            prefill_rows=0,
            mean_context=100.0,
            speculable=batch - refusing,
            bound={"eagle": bound},
        )
        if guard.observe(
            Cycle(
                context=context,
                strategy=strategy,
                rows=batch * 8,
                accepted=accepted,
                drafted=batch * 7,
            )
        ):
            return step
    return 0


def test_acceptance_collapse_stops_the_drafter_until_new_weights():
    guard = AcceptanceGuard((OFF, SMALL, EAGLE, PAST, LONG), 0.5)
    assert not run(guard, 0.8, 100)
    guard.renewed()
    assert guard.permitted(EAGLE) == EAGLE
    assert run(guard, 0.1, 100) * 4 in range(MIN_JUDGED, MIN_JUDGED + 8)
    assert guard.permitted(EAGLE) == PAST
    assert guard.permitted(SMALL) == PAST
    assert guard.permitted(OFF) == OFF
    assert guard.gauges() == {"drafters_resting": 1, "drafter_collapses": 1}
    guard.renewed()
    assert guard.permitted(EAGLE) == EAGLE and guard.gauges()["drafters_resting"] == 0
    assert run(guard, 0.1, 100), "what it was before the first collapse is still what is expected"
    guard.renewed()
    assert not run(guard, 0.75, 400) and guard.permitted(EAGLE) == EAGLE


def test_stopped_drafter_without_history_means_no_drafting():
    guard = AcceptanceGuard((OFF, EAGLE), 0.5)
    run(guard, 0.8, 100)
    guard.renewed()
    assert run(guard, 0.0, 100) and guard.permitted(EAGLE) == OFF


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_smaller_drop_do_not_trigger_the_guard(seed):
    guard = AcceptanceGuard((OFF, EAGLE), 0.5)
    run(guard, 0.7, 150, seed=seed)
    for change in range(8):
        guard.renewed()
        assert not run(guard, 0.5, 300, seed=100 * seed + change)


def test_guard_ignores_drops_long_after_a_weight_change():
    guard = AcceptanceGuard((OFF, EAGLE), 0.5)
    run(guard, 0.8, 100)
    guard.renewed()
    assert not run(guard, 0.8, MAX_JUDGED // 4)
    assert not run(guard, 0.0, 1000), "the text may have changed"
    guard.renewed()
    assert not run(guard, 0.0, 1000), "so low it was before this change"


def test_guard_ignores_steps_without_evidence():
    guard = AcceptanceGuard((OFF, EAGLE, PAST), 0.5)
    guard.renewed()
    assert not run(guard, 0.0, 1000), "nothing is known of before"
    guard = AcceptanceGuard((OFF, EAGLE, PAST), 0.5)
    run(guard, 0.8, 100)
    guard.renewed()
    assert not run(guard, 0.0, 100, strategy=OFF)
    assert not run(guard, 0.0, 100, strategy=PAST)
    assert not run(guard, 0.0, 100, refusing=1)
    assert not run(guard, 0.0, 100, bound=1)
    assert run(guard, 0.0, 100)


def test_guard_ratio_of_zero_disables_the_guard():
    guard = AcceptanceGuard((OFF, EAGLE), 0.0)
    run(guard, 0.8, 100)
    guard.renewed()
    assert not run(guard, 0.0, 1000) and guard.permitted(EAGLE) == EAGLE
