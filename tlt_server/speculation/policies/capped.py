"""Any policy under an operator's limit: above a number of decoding requests nothing is drafted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.policies import Policy


class Capped:
    def __init__(self, policy: Policy, max_batch: int) -> None:
        self._policy, self._max_batch = policy, max_batch
        self.measures = policy.measures

    def choose(self, context: StepContext) -> Strategy:
        return OFF if context.decoding > self._max_batch else self._policy.choose(context)

    def observe(self, cycle: Cycle) -> None:
        self._policy.observe(cycle)

    def strategies(self, requests: int, *, prompts: bool) -> Iterable[Strategy]:
        return self._policy.strategies(requests, prompts=prompts)

    def gauges(self) -> Mapping[str, float]:
        return self._policy.gauges()
