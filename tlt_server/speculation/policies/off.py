"""Plain decoding, always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlt_server.records import OFF, Cycle, StepContext, Strategy


class Off:
    def __init__(self, arms: Sequence[Strategy] = (), settings: None = None) -> None:
        pass

    def choose(self, context: StepContext) -> Strategy:
        return OFF

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        return {}
