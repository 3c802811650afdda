"""Events of the engine."""

from __future__ import annotations

from tlt_server.wire.events import MAX_OUTPUTS, Outputs, of_step
from tlt_server.wire.records import OFF, Cycle, StepContext, StepOutput


def test_step_ending_thousands_is_sent_in_parts_and_counted_once() -> None:
    context = StepContext(1, 0, 1.0, 0)
    cycle = Cycle(context=context, strategy=OFF, rows=1, accepted=(), drafted=0)
    gauges = {"running": 1.0}
    for count, parts in ((0, 1), (1, 1), (MAX_OUTPUTS, 1), (2 * MAX_OUTPUTS + 1, 3)):
        outputs = [StepOutput(id=f"{i}", token_ids=[], logprobs=[]) for i in range(count)]
        told = [*of_step(outputs, gauges, cycle)]
        assert len(told) == parts and all(isinstance(part, Outputs) for part in told)
        assert [output for part in told for output in part.outputs] == outputs
        assert all(len(part.outputs) <= MAX_OUTPUTS for part in told)
        assert [part.cycle for part in told] == [None] * (parts - 1) + [cycle]
        assert all(part.gauges == gauges for part in told)
