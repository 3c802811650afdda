"""One strategy whatever the load: for operators who know better, and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_server.records import OFF, Cycle, StepContext, Strategy


@dataclass(frozen=True)
class FixedSettings:
    strategy: Strategy | None = None  # the strategy to use; None = the first arm that speculates
    max_batch: int = 0  # decoding requests above which it stays off; 0 = no limit


class Fixed:
    def __init__(self, arms: Sequence[Strategy], settings: FixedSettings = FixedSettings()) -> None:
        speculating = [arm for arm in arms if arm != OFF]
        self.strategy = settings.strategy or (speculating[0] if speculating else OFF)
        self.max_batch = settings.max_batch

    def choose(self, context: StepContext) -> Strategy:
        if not context.speculable or (self.max_batch and context.decoding > self.max_batch):
            return OFF
        return self.strategy

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        return {"fixed_rows": float(self.strategy.rows)}
