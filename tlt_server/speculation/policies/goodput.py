"""The strategy with the most expected tokens per second, by what is known of steps and drafts.

Nothing is explored: the cost model predicts the time of a step under every strategy, and the
outlook of each drafter predicts its accepted tokens (`cost`, `outlook`), from steps of whichever
strategy ran. So each step weighs all of them: drafter, depth, width, rows of the batch, and no
speculation. Another drafter, depth or width replaces the one in use only where it promises `margin`
more, so that noise does not make the choice flap. Nothing latches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.records import OFF, Arms, Cycle, StepContext, Strategy
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.outlook import Outlook
from tlt_server.speculation.policies import Setup
from tlt_server.speculation.sizes import AnySize, Sizes

# Levels that a path may have for every draft row that a step may verify: deeper ones are wasted.
DEEPEST = 2
BROADEST = 4  # a tree is wide only where the widest level is at most this part of those rows


@dataclass(frozen=True)
class GoodputSettings:
    margin: float = 0.01  # by which other paths of the same drafter must be better
    change: float = 0.04  # by which another drafter, or none, must be


class TreeShape(NamedTuple):
    """A shape of draft trees."""

    drafter: int  # its index
    depth: int
    width: int


class Goodput:
    measures = True

    def __init__(
        self,
        knowledge: Knowledge,
        settings: GoodputSettings = GoodputSettings(),
        sizes: Sizes | None = None,
        arms: Arms | None = None,
    ) -> None:
        self._knowledge, self._settings, self._sizes = knowledge, settings, sizes or AnySize()
        self._names, self._outlooks = list(knowledge.outlooks), list(knowledge.outlooks.values())
        self._allowed = [_allowed(name, known, arms) for name, known in knowledge.outlooks.items()]
        self._current: TreeShape | None = None
        self._expected = self._switches = 0.0

    @classmethod
    def make(cls, setup: Setup) -> Goodput:
        return cls(setup.knowledge, sizes=setup.sizes, arms=setup.arms)

    def choose(self, context: StepContext) -> Strategy:
        if not context.speculable or not self._knowledge.cost.trained:
            return OFF
        prompts = context.prefill_rows > 0
        decode_V = self._sizes.decode_rows(context.decoding, prompts=prompts)
        computed_V = self._sizes.computed(decode_V, context.prefill_rows)
        off = context.decoding / float(self._seconds(context, computed_V[:1])[0])
        best, pick, rows = off, None, context.decoding
        held, held_rows = (off, 0) if self._current is None else (0.0, 0)
        for d, outlook in enumerate(self._outlooks if len(decode_V) > 1 else ()):
            rate_DWV = self._rates(d, outlook, context, decode_V, computed_V)
            i, j, v = np.unravel_index(int(rate_DWV.argmax()), rate_DWV.shape)
            if rate_DWV[i, j, v] > best:
                best, rows = float(rate_DWV[i, j, v]), int(decode_V[1 + v])
                pick = TreeShape(d, outlook.depths[i], outlook.widths[j])
            if self._current is not None and self._current.drafter == d:
                rate_V = rate_DWV[
                    outlook.depths.index(self._current.depth),
                    outlook.widths.index(self._current.width),
                ]
                held, held_rows = float(rate_V.max()), int(decode_V[1 + rate_V.argmax()])
        if pick != self._current and best > held * (1 + self._hurdle(pick)):
            self._current, held, held_rows = pick, best, rows
            self._switches += 1
        self._expected = held
        if self._current is None:
            return OFF
        return self._strategy(self._current, held_rows, context.decoding, prompts=prompts)

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn: the engine's knowledge has it already."""

    def strategies(self, requests: int, *, prompts: bool) -> Iterator[Strategy]:
        decode_V = self._sizes.decode_rows(requests, prompts=prompts)
        yield OFF
        for d, outlook in enumerate(self._outlooks):
            for i, j in np.argwhere(_sensible(outlook, decode_V) & self._allowed[d]):
                choice = TreeShape(d, outlook.depths[i], outlook.widths[j])
                for rows in decode_V[1:]:
                    yield self._strategy(choice, int(rows), requests, prompts=prompts)

    def gauges(self) -> Mapping[str, float]:
        return {"goodput_expected": self._expected, "goodput_switches": self._switches}

    def _hurdle(self, pick: TreeShape | None) -> float:
        now = self._current
        same = pick is not None and now is not None and pick.drafter == now.drafter
        return self._settings.margin if same else self._settings.change

    def _rates(
        self,
        d: int,
        outlook: Outlook,
        context: StepContext,
        decode_V: NDArray[np.int64],
        computed_V: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return the expected tokens per second of every depth and width, and of all numbers of
        decode rows but the first.
        """
        requests = context.speculable
        gain_DWV = outlook.gains((decode_V[1:] - context.decoding) / requests)
        depth_D, width_W = np.array(outlook.depths), np.array(outlook.widths)
        seconds_DWV = self._seconds(
            context, computed_V[1:], self._names[d], depth_D[:, None, None], width_W[None, :, None]
        )
        rate_DWV = (context.decoding + requests * gain_DWV) / seconds_DWV
        rate_DWV[~(_sensible(outlook, decode_V) & self._allowed[d])] = 0.0
        return rate_DWV

    def _seconds(
        self,
        context: StepContext,
        computed: NDArray[np.int64],
        drafter: str = "",
        depth: NDArray[np.int64] | int = 0,
        width: NDArray[np.int64] | int = 0,
    ) -> NDArray[np.float64]:
        return self._knowledge.cost.seconds(
            drafter, depth, width, context.decoding, computed, 0, context.mean_context
        )

    def _strategy(self, choice: TreeShape, rows: int, requests: int, *, prompts: bool) -> Strategy:
        budget = max(1, rows - self._sizes.batch(requests, prompts=prompts))
        mean = 1 + -(-(rows - requests) // requests)
        return Strategy(self._names[choice.drafter], choice.depth, choice.width, mean, budget)


def _allowed(drafter: str, outlook: Outlook, arms: Arms | None) -> NDArray[np.bool_]:
    """Tell by depth and width which trees an operator allows."""
    permitted = [
        [arms is None or arms.permit(drafter, depth, width) for width in outlook.widths]
        for depth in outlook.depths
    ]
    return np.array(permitted)


def _sensible(outlook: Outlook, decode_V: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell by depth and width which trees such a step can make use of. `decode_V`: the numbers of
    decode rows that it may have, the first of which are the roots.
    """
    roots, most = int(decode_V[0]), int(decode_V[-1])
    depth_D, width_W = np.array(outlook.depths), np.array(outlook.widths)
    deep_D = (depth_D == 1) | (roots * depth_D <= DEEPEST * most)
    broad_DW = (width_W == 1) | (
        (roots * width_W <= most // BROADEST) & (width_W <= depth_D[:, None])
    )
    return deep_D[:, None] & broad_DW
