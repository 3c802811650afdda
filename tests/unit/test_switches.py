"""The log of switches: what counts as one, and the reason that is derived for it."""

from __future__ import annotations

import pytest

from tlt_server.speculation.switches import SOON, SwitchLog
from tlt_server.wire.records import OFF, Pin, StepContext, Strategy, Switch

CHAIN, TREE = Strategy("eagle", 7, 1, 8), Strategy("eagle", 7, 4, 32)


def step(decoding: int = 16, prompts: int = 0, context: float = 100.0) -> StepContext:
    return StepContext(decoding, prompts, context, decoding)


def log(*pins: Pin) -> SwitchLog:
    """Return a log that has seen the chain in use."""
    made = SwitchLog(pins, clock=iter(range(1000)).__next__)
    made.chose(step(), CHAIN)
    made.take()
    return made


def test_first_strategy_is_logged_as_start_and_repeats_are_not() -> None:
    made = SwitchLog(clock=lambda: 7.0)
    for _ in range(3):
        made.chose(step(), CHAIN)
    assert made.take() == [Switch(7.0, "eagle:7x1x8", "", "start", 16)]
    assert made.take() == []


@pytest.mark.parametrize(
    ("now", "strategy", "reason"),
    [
        (step(), TREE, "acceptance"),
        (step(15), TREE, "acceptance"),
        (step(8), TREE, "batch shrank"),
        (step(20), OFF, "batch grew"),
        (step(prompts=64), OFF, "prompts"),
        (step(8, prompts=64), OFF, "prompts"),
        (step(context=150.0), OFF, "context"),
        (step(context=50.0), OFF, "context"),
    ],
)
def test_strategy_switch_names_its_reason(
    now: StepContext, strategy: Strategy, reason: str
) -> None:
    made = log()
    made.chose(now, strategy)
    assert made.take() == [Switch(1, strategy.name, "eagle:7x1x8", reason, now.decoding)]


def test_small_row_changes_are_not_strategy_switches() -> None:
    made = log()
    for rows in (9, 7, 6, 11):
        made.chose(step(), Strategy("eagle", 7, 1, rows, budget=16 * rows))
    assert made.take() == []
    made.chose(step(), Strategy("eagle", 7, 1, 12))
    assert len(made.take()) == 1


def test_start_and_end_of_a_pin_are_switch_reasons() -> None:
    made = log(Pin(1, 4, TREE))
    for requests, strategy in ((4, TREE), (5, CHAIN)):
        made.chose(step(requests), strategy)
        assert [switch.reason for switch in made.take()] == ["pin"]


def test_new_policy_is_the_reason_of_only_the_next_switch() -> None:
    made = log()
    for later, reason in ((0, "policy"), (1, "acceptance")):
        made.policy_replaced(())
        for _ in range(later):
            made.chose(step(), OFF)
        made.chose(step(), CHAIN if later else OFF)
        assert [switch.reason for switch in made.take()] == [reason]


def test_new_weights_are_the_switch_reason_for_a_bounded_time() -> None:
    for later, reason in ((SOON - 1, "weights"), (SOON, "acceptance")):
        made = log()
        made.weights_changed()
        for _ in range(later):
            made.chose(step(), CHAIN)
        made.chose(step(), OFF)
        assert [switch.reason for switch in made.take()] == [reason]


def test_steps_that_cannot_draft_log_no_switch() -> None:
    made = log()
    made.chose(StepContext(0, 512, 0.0, 0), OFF)
    made.chose(StepContext(4, 0, 9.0, 0), OFF)
    assert made.take() == []
