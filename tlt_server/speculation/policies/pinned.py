"""Wraps any policy with pins: ranges of batch sizes for which an operator has set the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tlt_server.speculation.policies import Policy
from tlt_server.wire.records import OFF, Cycle, Pin, StepContext, Strategy

MAX_BATCH = 2**31 - 1


def pinned_at(pins: Sequence[Pin], requests: int) -> Strategy | None:
    """Return the strategy of the first pin that covers this number of decoding requests."""
    return next((pin.strategy for pin in pins if pin.first <= requests <= pin.last), None)


def limit(max_batch: int) -> tuple[Pin, ...]:
    """Return the pin that stops drafts in batches larger than an operator's limit; 0: no limit."""
    return (Pin(max_batch + 1, MAX_BATCH, OFF),) if max_batch else ()


class Pinned:
    """A policy with pins. It observes every step, so its statistics are current when a pin ends."""

    def __init__(self, policy: Policy, pins: Sequence[Pin]) -> None:
        self.policy, self._pins = policy, tuple(pins)
        self.measures = policy.measures

    def choose(self, context: StepContext) -> Strategy:
        strategy = pinned_at(self._pins, context.decoding)
        if strategy is None:
            return self.policy.choose(context)
        return strategy if context.speculable else OFF

    def observe(self, cycle: Cycle) -> None:
        self.policy.observe(cycle)

    def strategies(self, requests: range, *, prompts: bool) -> Iterator[Strategy]:
        yield OFF
        pinned = {count: pinned_at(self._pins, count) for count in requests}
        yield from dict.fromkeys(strategy for strategy in pinned.values() if strategy)
        if free := [count for count, strategy in pinned.items() if strategy is None]:
            yield from self.policy.strategies(range(free[0], free[-1] + 1), prompts=prompts)

    def gauges(self) -> Mapping[str, float]:
        return self.policy.gauges()
