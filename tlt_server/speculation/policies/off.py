"""Plain decoding, always."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlt_server.speculation.policies import Setup
from tlt_server.wire.records import OFF, Cycle, StepContext, Strategy


class Off:
    measures = False

    @classmethod
    def make(cls, setup: Setup) -> Off:
        return cls()

    def choose(self, context: StepContext) -> Strategy:
        return OFF

    def observe(self, cycle: Cycle) -> None:
        """Do nothing: there is nothing to learn."""

    def strategies(self, requests: range, *, prompts: bool) -> Iterable[Strategy]:
        return (OFF,)

    def gauges(self) -> Mapping[str, float]:
        return {}
