"""TLT's Bucketed-Epsilon-Greedy bandit (arXiv 2511.16665, section 5), as a baseline.

Strategies are grouped by their verify rows, and each range of batch sizes uses one group (`arms`).
With probability epsilon a step explores an arm of its group; else it uses the arm with the largest
median reward in a sliding window. The reward is accept length times batch size over the step's
time, from steps without prompts. An arm's first window is the reward that cost model and acceptance
estimate predict, so a start is not blind.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tlt_server.speculation.cost import StepLoad
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import Setup
from tlt_server.speculation.policies.arms import Ladder
from tlt_server.wire.records import OFF, Cycle, StepContext, Strategy


@dataclass(frozen=True)
class BegSettings:
    epsilon: float = 0.1
    window: int = 300  # rewards remembered per group and arm
    seed: int = 0  # seeds the generator that decides when to explore


class Beg:
    measures = True

    def __init__(
        self, ladder: Ladder, knowledge: Knowledge, settings: BegSettings = BegSettings()
    ) -> None:
        self._ladder, self._knowledge, self._settings = ladder, knowledge, settings
        self._random = random.Random(settings.seed)
        self._rewards: dict[tuple[int, Strategy], deque[float]] = {}
        self._explored = self._steps = 0
        self._best = OFF

    @classmethod
    def make(cls, setup: Setup) -> Beg:
        return cls(setup.ladder, setup.knowledge)

    def choose(self, context: StepContext) -> Strategy:
        if not context.speculable:
            return OFF
        index = self._ladder.group(context.decoding)
        arms = self._ladder.of_group(index)
        self._steps += 1
        if self._random.random() < self._settings.epsilon:
            self._explored += 1
            return self._random.choice(arms)
        self._best = max(arms, key=lambda arm: statistics.median(self._window(index, arm, context)))
        return self._best

    def observe(self, cycle: Cycle) -> None:
        context, arm = cycle.context, cycle.strategy
        if context.prefill_rows or not context.speculable or cycle.step_s <= 0:
            return
        index = self._ladder.group(context.decoding)
        if arm in self._ladder.of_group(index):
            self._window(index, arm, context).append(cycle.emitted / cycle.step_s)

    def strategies(self, requests: range, *, prompts: bool) -> Iterator[Strategy]:
        yield OFF
        first, last = self._ladder.group(requests[0]), self._ladder.group(requests[-1])
        for index in range(first, last + 1):
            yield from self._ladder.of_group(index)

    def gauges(self) -> Mapping[str, float]:
        return {
            "beg_best_rows": float(self._best.rows),
            "beg_explored_share": self._explored / max(1, self._steps),
        }

    def _window(self, index: int, arm: Strategy, context: StepContext) -> deque[float]:
        """Return the rewards of an arm, newest last."""
        key = index, arm
        if key not in self._rewards:
            expected = self._expected(arm, context)
            self._rewards[key] = deque([expected], maxlen=self._settings.window)
        return self._rewards[key]

    def _expected(self, arm: Strategy, context: StepContext) -> float:
        """Return the tokens per second that the engine's knowledge predicts."""
        requests, known = context.decoding, self._knowledge
        if not known.cost.trained:
            return 0.0
        rows = requests + arm.draft_rows(requests)
        load = StepLoad(arm.drafter, arm.depth, arm.width, requests, rows, 0, context.mean_context)
        gain = 0.0
        if arm.drafter:
            estimate = known.estimates[arm.drafter]
            gain = float(estimate.gain(arm.depth, arm.width, np.array([arm.rows - 1.0]))[0])
        return requests * (1 + gain) / known.cost.predict(load)
