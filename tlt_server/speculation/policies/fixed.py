"""One strategy for every load: for operators who know better, and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.policies import Setup


class Fixed:
    def __init__(self, arms: Sequence[Strategy]) -> None:
        """The first arm that speculates; OFF if there is none."""
        self.strategy = next((arm for arm in arms if arm != OFF), OFF)

    @classmethod
    def make(cls, setup: Setup) -> Fixed:
        return cls(setup.arms)

    def choose(self, context: StepContext) -> Strategy:
        return self.strategy if context.speculable else OFF

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        return {"fixed_rows": float(self.strategy.rows)}
