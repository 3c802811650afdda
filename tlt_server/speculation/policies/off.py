"""Plain decoding, always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.policies.arms import CPU_ROWS, Rows


class Off:
    def __init__(self, arms: Sequence[Strategy] = (), rows: Rows = CPU_ROWS) -> None:
        pass

    def choose(self, context: StepContext) -> Strategy:
        return OFF

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        return {}
