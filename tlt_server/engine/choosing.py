"""Chooses each step's strategy, and keeps the knowledge that steps add to."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from tlt_server.engine.knowledge_file import KnowledgeFile
from tlt_server.engine.policy_changes import PolicyChanges
from tlt_server.speculation.guard import AcceptanceGuard
from tlt_server.speculation.knowledge import Drafted, Knowledge, WeightsInUse
from tlt_server.speculation.policies import Policy
from tlt_server.speculation.switches import SwitchLog
from tlt_server.wire.records import Cycle, StepContext, Strategy


class StrategyChoice:
    def __init__(
        self,
        policy: Policy,
        knowledge: Knowledge,
        knowledge_file: KnowledgeFile,
        guard: AcceptanceGuard,
        switches: SwitchLog,
        changes: PolicyChanges,
        training: Callable[[], bool],
    ) -> None:
        """`training`: returns whether a drafter is being trained now."""
        self.policy, self.changes, self.training = policy, changes, training
        self.knowledge, self.knowledge_file = knowledge, knowledge_file
        self.guard, self.switches = guard, switches

    def unlearning(self) -> StrategyChoice:
        """Return another choice with the same policy, whose observations do not count here."""
        return StrategyChoice(
            self.policy,
            Knowledge(()),
            self.knowledge_file,
            AcceptanceGuard((), 0.0),
            SwitchLog(),
            self.changes,
            self.training,
        )

    def advance(self) -> None:
        """Prepare a part of a new policy or activate it, between two steps."""
        if change := self.changes.advance():
            self.policy = change.policy
            self.switches.policy_replaced(change.command.pins)

    def renew(self, weights: WeightsInUse, install: Callable[[], None]) -> None:
        """Switch to new weights by calling `install`, between two steps."""
        self.knowledge.renew(weights, install)
        self.guard.renewed()
        self.switches.weights_changed()

    def choose(self, context: StepContext) -> Strategy:
        """Return the strategy of the next step."""
        strategy = self.guard.permitted(self.policy.choose(context))
        self.switches.chose(context, strategy)
        return strategy

    def observe(self, cycle: Cycle, drafted: Drafted | None) -> Cycle:
        """Learn from a step; return its cycle with the predicted time."""
        predicted_s = self.knowledge.observe(cycle, drafted, training=self.training())
        cycle = msgspec.structs.replace(cycle, predicted_s=predicted_s)
        self.policy.observe(cycle)
        if news := self.guard.observe(cycle):
            print(f"tlt: {news}", file=sys.stderr)
        return cycle

    def gauges(self) -> dict[str, float]:
        return {
            **self.policy.gauges(),
            **self.changes.gauges(),
            **self.knowledge.gauges(),
            **self.guard.gauges(),
        }
