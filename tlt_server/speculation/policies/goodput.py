"""The strategy with the most expected tokens per second, by what is known of steps and drafts.

Nothing is explored: the cost model predicts the time of a step under every strategy, and the
outlook of each drafter predicts its accepted tokens (`cost`, `outlook`), from steps of whichever
strategy ran. So each step weighs all of them: drafter, depth, width, draft rows of the batch, and
no speculation. Another strategy replaces the one in use only where it promises `margin` more, so
that noise does not make the choice flap. Nothing latches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.cost import StepLoad
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.outlook import POINTS, Outlook
from tlt_server.speculation.policies import Setup


@dataclass(frozen=True)
class GoodputSettings:
    margin: float = 0.03  # by which another strategy of the same drafter must be better
    change: float = 0.08  # by which one of another drafter, or none, must be
    first_x: int = 1  # index of the smallest point of the curves that is considered


class _Options:
    """All strategies of one drafter, as arrays: N of them."""

    def __init__(self, drafter: str, outlook: Outlook) -> None:
        self.drafter, self._outlook = drafter, outlook
        grid = np.meshgrid(
            np.array(outlook.depths), np.array(outlook.widths), np.array(POINTS), indexing="ij"
        )
        depth, width, nodes = (axis.reshape(-1) for axis in grid)
        most = depth * width
        self._kept_N = np.flatnonzero((nodes > 0) & (nodes <= most))
        self.depth_N, self.width_N = depth[self._kept_N], width[self._kept_N]
        self.nodes_N = nodes[self._kept_N]  # draft rows per request

    @property
    def gain_N(self) -> NDArray[np.float64]:
        """Expected accepted draft tokens per request."""
        return self._outlook.ratio * self._outlook.curve_DWX.reshape(-1)[self._kept_N]

    def strategy(self, n: int, requests: int) -> Strategy:
        budget = self.budget(n, requests)
        return Strategy(
            self.drafter,
            int(self.depth_N[n]),
            int(self.width_N[n]),
            1 + -(-budget // requests),
            budget,
        )

    def budget(self, n: int, requests: int) -> int:
        return max(1, round(float(self.nodes_N[n]) * requests))


class Goodput:
    def __init__(self, knowledge: Knowledge, settings: GoodputSettings = GoodputSettings()) -> None:
        self._knowledge, self._settings = knowledge, settings
        self._options = [_Options(name, known) for name, known in knowledge.outlooks.items()]
        self._current: tuple[int, int] | None = None  # index of a drafter and of its option
        self._expected = self._switches = 0.0

    @classmethod
    def make(cls, setup: Setup) -> Goodput:
        return cls(setup.knowledge)

    def choose(self, context: StepContext) -> Strategy:
        if not context.speculable or not self._knowledge.cost.trained:
            return OFF
        rate_off = context.decoding / self._plain_seconds(context)
        scores = [self._scores(options, context) for options in self._options]
        best = max(
            ((float(score_N.max()), d, int(score_N.argmax())) for d, score_N in enumerate(scores)),
            default=(0.0, 0, 0),
        )
        now = self._current
        held = rate_off if now is None else float(scores[now[0]][now[1]])
        rate, pick = max((rate_off, None), (best[0], best[1:]), key=lambda found: found[0])
        same = now is not None and pick is not None and now[0] == pick[0]
        if pick != now and rate > held * (
            1 + (self._settings.margin if same else self._settings.change)
        ):
            self._current, held = pick, rate
            self._switches += 1
        self._expected = held
        if self._current is None:
            return OFF
        drafter, option = self._current
        return self._options[drafter].strategy(option, context.speculable)

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn: the engine's knowledge has it already."""

    def gauges(self) -> Mapping[str, float]:
        return {"goodput_expected": self._expected, "goodput_switches": self._switches}

    def _scores(self, options: _Options, context: StepContext) -> NDArray[np.float64]:
        """Expected tokens per second of every option."""
        requests = context.speculable
        budget_N = np.maximum(1, np.rint(options.nodes_N * requests))
        seconds_N = self._knowledge.cost.seconds(
            options.drafter,
            options.depth_N,
            options.width_N,
            requests,
            context.decoding + budget_N,
            context.prefill_rows,
            context.mean_context,
        )
        tokens_N = context.decoding + requests * options.gain_N
        return np.where(options.nodes_N * requests >= 1, tokens_N / seconds_N, 0.0)

    def _plain_seconds(self, context: StepContext) -> float:
        rows = context.decoding
        return self._knowledge.cost.predict(
            StepLoad("", 0, 0, rows, rows, context.prefill_rows, context.mean_context)
        )
