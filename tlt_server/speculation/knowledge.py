"""The knowledge that an engine has of its own steps: their time, and the worth of its drafts.

It belongs to the engine, not to a policy, so a change of policy loses nothing; every step adds to
it, whichever policy chose that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from tlt_server.records import Cycle
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.cost import CostModel, CostRecord, load_of
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.outlook import Outlook, OutlookRecord

EVERY = 16  # steps of which one is asked what was expected of it
KEPT_WEIGHTS = 8  # earlier weights of which it is kept what drafts were worth
RETURN = 3  # steps within which a drafter that comes back has little to catch up with


class Drafted(NamedTuple):
    """The trees that were drafted for a step."""

    candidates: Candidates
    requests: int
    predicted: float  # sum of the survivals of the nodes that were verified


class KnowledgeRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Knowledge as a file keeps it."""

    cost: CostRecord
    outlooks: dict[str, OutlookRecord]


class Knowledge:
    def __init__(self, drafters: tuple[str, ...], device: str = "cpu") -> None:
        self.cost = CostModel()
        self.outlooks = {
            name: Outlook(half.depths, half.widths)
            for name in drafters
            for half in (DRAFTERS[name].half(device),)
        }
        self.expected_rate = 0.0  # tokens per second of steps like the last ones
        self.weights = ""  # names of the versions of target and drafter
        self._known: dict[str, dict[str, OutlookRecord]] = {}  # by earlier weights, newest last
        self._step = 0
        self._last_used: dict[str, int] = {}  # the step that last used a drafter

    def observe(self, cycle: Cycle, drafted: Drafted | None, *, training: bool = False) -> float:
        """Learn from a step. `training`: while a drafter was trained. Return the seconds that were
        expected of it; 0: nothing was.
        """
        self._step += 1
        predicted_s = 0.0
        drafter = cycle.strategy.drafter
        settled = not drafter or self._step - self._last_used.get(drafter, -RETURN) < RETURN
        if drafter:
            self._last_used[drafter] = self._step
        if settled:  # else the drafter had to catch up first
            predicted_s = self.cost.observe(load_of(cycle), cycle.step_s, training=training)
        for name, outlook in self.outlooks.items():
            found = drafted if name == drafter else None
            if found is not None:
                outlook.verified(found.predicted, float(sum(cycle.accepted)))
            if found is not None and outlook.due:
                outlook.see(found.candidates, found.requests)
            else:
                outlook.unseen()
        if predicted_s and self._step % EVERY == 0:
            self.expected_rate = self._tokens(cycle) / predicted_s
        return predicted_s

    def _tokens(self, cycle: Cycle) -> float:
        """Return the tokens that are expected of a step like this one."""
        context, strategy = cycle.context, cycle.strategy
        outlook = self.outlooks.get(strategy.drafter)
        if outlook is None or not context.speculable:
            return float(context.decoding)
        rows = np.array([strategy.draft_rows(context.speculable) / context.speculable])
        gain = outlook.gain(strategy.depth, strategy.width, rows)[0]
        return context.decoding + context.speculable * float(gain)

    def renewed(self, weights: str) -> None:
        """Take up what was known of the drafters under these weights, or doubt what is known, as
        the weights are new.
        """
        self._known[self.weights] = {name: known.record() for name, known in self.outlooks.items()}
        found = self._known.pop(weights, None)
        while len(self._known) > KEPT_WEIGHTS:
            del self._known[next(iter(self._known))]
        self.weights = weights
        for name, outlook in self.outlooks.items():
            if found is None:
                outlook.forget()
            else:
                outlook.restore(found[name])

    def record(self) -> KnowledgeRecord:
        return KnowledgeRecord(
            self.cost.record(), {name: known.record() for name, known in self.outlooks.items()}
        )

    def restore(self, record: KnowledgeRecord) -> None:
        """Take over what another engine has learnt, of the drafters that both have. `ValueError`
        and no change if it is not of this form.
        """
        cost = CostModel()
        cost.restore(record.cost)
        both = [name for name in self.outlooks if name in record.outlooks]
        for name in both:
            self.outlooks[name].check(record.outlooks[name])
        self.cost = cost
        for name in both:
            self.outlooks[name].restore(record.outlooks[name])

    def gauges(self) -> Mapping[str, float]:
        slowdown = self.cost.slowdown
        return {
            **({} if slowdown is None else {"training_slowdown": slowdown}),
            "cost_error": self.cost.error,
            "cost_speed": self.cost.speed,
            "expected_rate": self.expected_rate,
            **{f"outlook_ratio_{name}": known.ratio for name, known in self.outlooks.items()},
        }
