"""One strategy for every load: for operators who know their load, and for benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlt_server.speculation.policies import Setup
from tlt_server.wire.records import OFF, Cycle, StepContext, Strategy


class Fixed:
    measures = False

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @classmethod
    def make(cls, setup: Setup) -> Fixed:
        return cls(setup.strategy)

    def choose(self, context: StepContext) -> Strategy:
        return self.strategy if context.speculable else OFF

    def observe(self, cycle: Cycle) -> None:
        """Do nothing: there is nothing to learn."""

    def strategies(self, requests: range, *, prompts: bool) -> Iterable[Strategy]:
        return OFF, self.strategy

    def gauges(self) -> Mapping[str, float]:
        return {"fixed_rows": float(self.strategy.rows)}
