"""The best choice for a step, in hindsight.

For every drafter, depth, width and number of draft rows, and for no speculation, the tokens of a
step are known, because the record says which drafts its response follows, and its seconds follow
from the cost model. The best choice is the one with the most tokens per second.

Its options are those of a policy: rows still go to the most probable nodes, not to those that will
be accepted. It additionally knows the outcome of this very step for each option. So no policy can
do better in a step, and even one that knew all probabilities would do slightly worse. It optimises
the throughput of each step by itself, in the state that the judged policy has reached, and does not
look ahead: it ignores that a long response delays the end of the batch.

A step of t seconds and n tokens has a regret of t - n / r seconds, where r is the best choice's
rate: its extra time over the same tokens at that rate. It is never negative, and zero for the best
choice. Much of it is luck that no policy can foresee. The *expected* regret leaves that out: there
the tokens of every choice, also of the actual one, are the sum of the acceptance probabilities of
its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.bench.replaying.drafts import shapes_of
from tlt_server.bench.replaying.limits import Limits
from tlt_server.speculation.accept import on_path
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.branches import Proposing
from tlt_server.speculation.cost import CostModel
from tlt_server.wire.records import OFF, StepContext, Strategy


class OpenStep(NamedTuple):
    """A step before it runs, with the device's state."""

    context: StepContext
    batch: DraftBatch  # requests that decode and have not ended
    follow_BD: NDArray[np.int32]  # tokens of the responses after the roots, -1 after the last
    left_B: NDArray[np.int64]  # output tokens that are still to come
    others: int  # tokens of requests that do not decode: their prompt ends here

    @property
    def prompts(self) -> bool:
        return self.context.prefill_rows > 0

    @property
    def plain(self) -> int:
        """Tokens that the step gives without drafts."""
        return len(self.batch) + self.others

    def counts(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return which nodes can add a token: a response's last token needs no draft."""
        return candidates.depth_N < self.left_B[candidates.request_N]


class Best(NamedTuple):
    """The best choice for a step."""

    rate: float  # tokens per second
    strategy: Strategy
    expected_rate: float  # the best that the survivals of the trees promise


class Hindsight:
    def __init__(
        self, drafts: Mapping[str, Proposing], limits: Limits, cost: CostModel, device: str
    ) -> None:
        self._drafts, self._limits, self._cost, self._device = drafts, limits, cost, device

    def best(self, step: OpenStep) -> Best:
        context = step.context
        plain = step.plain
        none = np.zeros(1, np.int64)
        seconds = self._seconds(step, OFF, none, none)
        best = Best(plain / float(seconds[0]), OFF, plain / float(seconds[0]))
        if not len(step.batch) or context.speculable == 0:
            return best
        rows_R = self._limits.choices(context.decoding, len(step.batch), prompts=step.prompts)
        for strategy, candidates in self._trees(step):
            counts_N = step.counts(candidates)
            own_N = on_path(candidates, step.follow_BD) & counts_N
            expected_N = np.where(counts_N, candidates.acceptance_N, np.float32(0))
            ranked_N = self._limits.ranked(candidates.acceptance_N)
            order = np.lexsort((np.arange(len(own_N)), candidates.depth_N, -ranked_N))
            if not len(order) or not len(rows_R):
                continue
            # More rows than nodes verify all of them.
            drafts_R, first_R = np.unique(np.minimum(rows_R, len(order)), return_index=True)
            seconds_R = self._seconds(step, strategy, rows_R[first_R], drafts_R)
            rate_R = (plain + np.cumsum(own_N[order])[drafts_R - 1]) / seconds_R
            expected_R = (plain + np.cumsum(expected_N[order])[drafts_R - 1]) / seconds_R
            best = best._replace(expected_rate=max(best.expected_rate, float(expected_R.max())))
            at = int(rate_R.argmax())
            if rate_R[at] > best.rate:
                asked = self._asking(step, strategy, int(rows_R[first_R[at]]))
                best = best._replace(rate=float(rate_R[at]), strategy=asked)
        return best

    def _trees(self, step: OpenStep) -> Iterator[tuple[Strategy, Candidates]]:
        """Yield the trees of every drafter, depth and width."""
        requests, live = step.context.decoding, len(step.batch)
        for name, drafts in self._drafts.items():
            for depth, width in shapes_of(drafts, name, self._device):
                asked = Strategy(name, depth, width, 1 + depth * width)
                fits = self._limits.of(asked, requests, live, prompts=step.prompts).strategy
                if fits == asked:
                    # No budget, so that nothing is cut off; the rows are chosen here.
                    whole = Strategy(name, depth, width, 1)
                    yield whole, drafts.propose(step.batch, whole)

    def _asking(self, step: OpenStep, strategy: Strategy, drafts: int) -> Strategy:
        """Return the strategy that verifies this number of draft rows."""
        context = step.context
        budget = self._limits.budget(
            drafts, context.decoding, len(step.batch), prompts=step.prompts
        )
        rows = 1 + -(-budget // context.decoding)
        return Strategy(strategy.drafter, strategy.depth, strategy.width, rows, budget)

    def _seconds(
        self,
        step: OpenStep,
        strategy: Strategy,
        asked_R: NDArray[np.int64],
        drafts_R: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        context = step.context
        return self._cost.seconds(
            strategy.drafter,
            strategy.depth,
            strategy.width,
            context.decoding,
            self._limits.read(context, len(step.batch), asked_R, drafts_R),
            0,
            context.mean_context,
        )
