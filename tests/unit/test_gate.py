"""Every reason that holds the gate, alone and with every other one, and what the state is then."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.gate import BY_CHANGE, BY_OPERATOR, Reason, StepGate

STATES = {reason: "draining" if reason is Reason.DRAINING else "closed" for reason in Reason}


def possible(reasons: set[Reason]) -> bool:
    return Reason.WEIGHTS_ASLEEP not in reasons or not reasons & BY_CHANGE


@pytest.mark.parametrize("first, then", list(product(Reason, Reason)))
def test_each_pause_reason_holds_until_released(first: Reason, then: Reason) -> None:
    gate = StepGate()
    gate.check()
    assert gate.state == "open"
    gate.hold(first)
    assert gate.state == STATES[first]
    gate.hold(then)
    assert gate.held_for(first) and gate.held_for(then)
    gate.release(first)
    assert not gate.held_for(first)
    assert gate.state == ("open" if first is then else STATES[then])
    gate.release(then)
    assert gate.state == "open"


def test_adapter_drain_delays_only_requests_of_that_adapter() -> None:
    gate = StepGate()
    assert gate.lets_start("") and gate.lets_start("a")
    gate.hold(Reason.DRAINING, adapter="a")
    assert gate.lets_start("") and gate.lets_start("b") and not gate.lets_start("a")
    gate.hold(Reason.PAUSED)
    assert not gate.lets_start("b")
    gate.release(Reason.PAUSED, Reason.DRAINING)
    assert gate.lets_start("a")
    gate.hold(Reason.DRAINING)
    assert not (gate.lets_start("") or gate.lets_start("a"))


@given(st.lists(st.tuples(st.sampled_from(["hold", "release"]), st.sets(st.sampled_from(Reason)))))
def test_gate_state_follows_its_reasons_in_any_order(
    changes: list[tuple[str, set[Reason]]],
) -> None:
    """The slow twin is a set of reasons, looked at in full."""
    gate, held = StepGate(), set[Reason]()
    for change, reasons in changes:
        held = held | reasons if change == "hold" else held - reasons
        getattr(gate, change)(*reasons)
        assert {reason for reason in Reason if gate.held_for(reason)} == held
        states = {STATES[reason] for reason in held}
        expected = next((state for state in ("closed", "draining") if state in states), "open")
        assert gate.state == expected and gate.closed == (expected == "closed")
        assert gate.by_operator == bool(held & BY_OPERATOR)
        if possible(held):
            gate.check()
        else:
            with pytest.raises(AssertionError, match="weights change while they sleep"):
                gate.check()
