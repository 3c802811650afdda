"""An engine's knowledge of its steps: their time, and the gain of its drafts.

It belongs to the engine, not to a policy, so a change of policy loses nothing; every step adds to
it under every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct, field

from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.calibration import TableRecord
from tlt_server.speculation.cost import CostModel, CostRecord, load_of
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.estimate import AcceptanceEstimate, EstimateRecord
from tlt_server.speculation.learnt import Learnt, Record
from tlt_server.wire.records import Cycle

EVERY = 16  # steps of which one is asked what was expected of it
KEPT_WEIGHTS = 8  # earlier weights under which it is kept what drafts were worth
RETURN = 3  # steps within which a drafter that comes back has little to catch up with


class Drafted(NamedTuple):
    """The trees that were drafted for a step."""

    candidates: Candidates
    requests: int
    predicted: float  # sum of the acceptance probabilities of the verified nodes


class WeightsInUse(NamedTuple):
    """Digests of the content of the active weights; version names do not identify content."""

    target: str
    drafter: str  # empty without a drafter


class LearntRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The gain of drafts, as learned under some weights."""

    target: str
    drafter: str
    estimates: dict[str, EstimateRecord] = field(name="outlooks")
    tables: dict[str, TableRecord]

    @property
    def weights(self) -> WeightsInUse:
        return WeightsInUse(self.target, self.drafter)


class KnowledgeRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the knowledge in a file."""

    cost: CostRecord
    learnt: Annotated[list[LearntRecord], Meta(min_length=1)]  # last: under the weights in use


class Knowledge:
    def __init__(self, drafters: tuple[str, ...], device: str = "cpu") -> None:
        self.cost = CostModel()
        self.estimates = {
            name: AcceptanceEstimate(half.depths, half.widths)
            for name in drafters
            for half in (DRAFTERS[name].half(device),)
        }
        self.expected_rate = 0.0  # tokens per second of steps like the last ones
        # The acceptance tables by which drafters build trees: the device's, once it made them.
        self.tables: Mapping[str, Learnt[TableRecord]] = {}
        self.weights = WeightsInUse("", "")
        self._known: list[LearntRecord] = []  # under earlier weights, newest last
        self._doubtful = False  # nothing was learnt since it was doubted
        self._step = 0
        self._last_used: dict[str, int] = {}  # the step that last used a drafter

    def observe(self, cycle: Cycle, drafted: Drafted | None, *, training: bool = False) -> float:
        """Learn from a step. `training`: a drafter was trained during it. Return the predicted
        seconds of the step; 0 without a prediction.
        """
        self._step += 1
        predicted_s = 0.0
        drafter = cycle.strategy.drafter
        settled = not drafter or self._step - self._last_used.get(drafter, -RETURN) < RETURN
        if drafter:
            self._last_used[drafter] = self._step
            self._doubtful = False
        if settled:  # else the drafter had to catch up first
            predicted_s = self.cost.observe(load_of(cycle), cycle.step_s, training=training)
        for name, estimate in self.estimates.items():
            found = drafted if name == drafter else None
            if found is not None:
                estimate.verified(found.predicted, float(sum(cycle.accepted)))
            if found is not None and estimate.due:
                estimate.see(found.candidates, found.requests)
            else:
                estimate.unseen()
        if predicted_s and self._step % EVERY == 0:
            self.expected_rate = self._tokens(cycle) / predicted_s
        return predicted_s

    def _tokens(self, cycle: Cycle) -> float:
        """Return the expected tokens of a step like this one."""
        context, strategy = cycle.context, cycle.strategy
        estimate = self.estimates.get(strategy.drafter)
        if estimate is None or not context.speculable:
            return float(context.decoding)
        rows = np.array([strategy.draft_rows(context.speculable) / context.speculable])
        gain = estimate.gain(strategy.depth, strategy.width, rows)[0]
        return context.decoding + context.speculable * float(gain)

    def renew(self, weights: WeightsInUse, install: Callable[[], None] = lambda: None) -> None:
        """Call `install` to activate new weights, between two steps: save the statistics of the
        previous weights, and load those of the new ones.
        """
        self._known = self._learnt()[-KEPT_WEIGHTS:]
        install()
        self._take_up(weights)

    def _take_up(self, weights: WeightsInUse) -> None:
        """Load the statistics learned under these weights. If there are none, load those of the
        drafter under another target or keep the current ones, and discount them, only once for
        several changes in a row.
        """
        self.weights = weights
        same = [each for each in self._known if each.weights == weights]
        of_drafter = [each for each in self._known if each.drafter == weights.drafter]
        for found in (same or of_drafter)[-1:]:
            _restore(self.estimates, found.estimates)
            _restore(self.tables, found.tables)
        if same:
            self._doubtful = False
        elif not self._doubtful:
            held: list[Learnt[Any]] = [*self.estimates.values(), *self.tables.values()]
            for learnt in held:
                learnt.forget()
            self._doubtful = True

    def _learnt(self) -> list[LearntRecord]:
        """Return the statistics by weights; those of the active weights are last."""
        now = LearntRecord(
            *self.weights,
            {name: known.record() for name, known in self.estimates.items()},
            {name: known.record() for name, known in self.tables.items()},
        )
        return [*(each for each in self._known if each.weights != self.weights), now]

    def costs(self) -> CostRecord | None:
        """Return the times of steps; None before a profile has measured them."""
        return self.cost.record() if self.cost.profiled else None

    def record(self) -> KnowledgeRecord:
        return KnowledgeRecord(self.cost.record(), self._learnt()[-KEPT_WEIGHTS - 1 :])

    def restore(self, record: KnowledgeRecord) -> None:
        """Load another engine's knowledge, for the drafters that both have. `ValueError`, and no
        change, if its form is wrong.
        """
        cost = CostModel()
        cost.restore(record.cost)
        for each in record.learnt:
            _check(self.estimates, each.estimates)
            _check(self.tables, each.tables)
        self.cost, self._known = cost, record.learnt[-KEPT_WEIGHTS:]
        _restore(self.estimates, record.learnt[-1].estimates)
        self._doubtful = False
        self._take_up(self.weights)

    def gauges(self) -> Mapping[str, float]:
        slowdown = self.cost.slowdown
        return {
            **({} if slowdown is None else {"training_slowdown": slowdown}),
            "cost_error": self.cost.error,
            "cost_speed": self.cost.speed,
            "expected_rate": self.expected_rate,
            **{f"outlook_ratio_{name}": known.ratio for name, known in self.estimates.items()},
        }


def _check(learnt: Mapping[str, Learnt[Record]], records: Mapping[str, Record]) -> None:
    for name in learnt.keys() & records.keys():
        learnt[name].check(records[name])


def _restore(learnt: Mapping[str, Learnt[Record]], records: Mapping[str, Record]) -> None:
    for name in learnt.keys() & records.keys():
        learnt[name].restore(records[name])
