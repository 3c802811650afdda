"""Chooses the strategy with the most expected tokens per second, from knowledge of steps and
drafts.

Nothing is explored: the cost model predicts the time of a step under every strategy, and each
drafter's acceptance estimate predicts its accepted tokens (`cost`, `estimate`), from steps of any
strategy. So each step weighs all of them: drafter, depth, width, rows of the batch, and no
speculation. Another drafter, depth or width replaces the current one only if it promises `margin`
more, so that noise does not make the choice flap. No choice is final. A strategy without captured
graphs waits until idle time has captured them, or until it would have saved as much time as the
capture takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.speculation.estimate import AcceptanceEstimate, CurvePoints
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import Setup
from tlt_server.speculation.sizes import AnySize, Recordings, Sizes
from tlt_server.wire.records import OFF, Arms, Cycle, StepContext, Strategy

# Levels that a path may have for every draft row that a step may verify: deeper ones are wasted.
DEEPEST = 2
KEPT_SHAPES = 1024  # kinds of steps
RECENT = 64  # choices that the mean time of one is about
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


class Weighed(NamedTuple):
    """A strategy for the next step, with its expected result."""

    rate: float  # tokens per second
    seconds: float
    pick: TreeShape | None  # None: nothing is drafted
    rows: int  # decode rows


class StepShapes(NamedTuple):
    """The strategies of one drafter to weigh for steps of one kind."""

    points_V: CurvePoints  # draft rows per request
    depth_D11: NDArray[np.int64]
    width_1W1: NDArray[np.int64]
    useful_DWV: NDArray[np.float64]  # 1, or 0 where a strategy cannot be chosen

    @classmethod
    def of(
        cls,
        estimate: AcceptanceEstimate,
        context: StepContext,
        requests: int,
        decode_V: NDArray[np.int64],
        allowed_DW: NDArray[np.bool_],
    ) -> StepShapes:
        """`requests`: the number that take this drafter's drafts."""
        drafts_V = np.minimum(decode_V[1:] - context.decoding, context.most_drafts)
        depth_D, width_W = np.array(estimate.depths), np.array(estimate.widths)
        sensible_DW = _sensible(estimate, decode_V) & allowed_DW
        sensible_DW &= ((depth_D == 1) | (depth_D <= context.deepest))[:, None]
        # Rows beyond all nodes are not computed on a CPU, so no step would correct their price.
        nodes_DW = requests * _nodes(depth_D[:, None], width_W)
        fewer_V = np.concatenate(([-1], drafts_V[:-1]))
        useful_DWV = sensible_DW[..., None] & (fewer_V < nodes_DW[..., None])
        return cls(
            CurvePoints.of(drafts_V / requests),
            depth_D[:, None, None],
            width_W[None, :, None],
            useful_DWV.astype(np.float64),
        )


NONE = Weighed(0.0, 0.0, None, 0)
NOTHING_111 = np.zeros((1, 1, 1), np.int64)


class Goodput:
    measures = True

    def __init__(
        self,
        knowledge: Knowledge,
        settings: GoodputSettings = GoodputSettings(),
        sizes: Sizes | None = None,
        arms: Arms | None = None,
        recordings: Recordings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._knowledge, self._settings, self._sizes = knowledge, settings, sizes or AnySize()
        self._names, self._estimates = list(knowledge.estimates), list(knowledge.estimates.values())
        self._allowed = [_allowed(name, known, arms) for name, known in knowledge.estimates.items()]
        self._recordings = recordings
        self._shapes: dict[tuple[int, ...], StepShapes] = {}
        self._current: TreeShape | None = None
        self._expected = self._switches = 0.0
        self._clock, self._choices, self._choice_us = clock, 0, 0.0

    @classmethod
    def make(cls, setup: Setup) -> Goodput:
        return cls(setup.knowledge, sizes=setup.sizes, arms=setup.arms, recordings=setup.recordings)

    def choose(self, context: StepContext) -> Strategy:
        if not context.speculable or not self._knowledge.cost.trained:
            return OFF
        began_s = self._clock()
        strategy = self._best_for(context)
        self._choices += 1
        taken_us = 1e6 * (self._clock() - began_s)
        self._choice_us += (taken_us - self._choice_us) / min(self._choices, RECENT)
        return strategy

    def _best_for(self, context: StepContext) -> Strategy:
        ready, held, waiting = self._weigh(context)
        best = max(ready, key=lambda choice: choice.rate, default=NONE)
        late = max(waiting, key=lambda choice: choice.rate, default=NONE)
        if best.rate <= 0:  # nothing is recorded, so something has to be
            best = late
        if best.pick != self._current and best.rate > held.rate * (1 + self._hurdle(best.pick)):
            held = best
        if late.rate > held.rate > 0 and self._records(context, late, held):
            held = late
        self._switches += held.pick != self._current
        self._current, self._expected = held.pick, held.rate
        return self._strategy(held, context)

    def _weigh(self, context: StepContext) -> tuple[list[Weighed], Weighed, list[Weighed]]:
        """Return the best choices with graphs, the best choice with the current tree, and the best
        choices without graphs.
        """
        decode_V = self._sizes.decode_rows(context.decoding, prompts=context.prefill_rows > 0)
        computed_V = self._sizes.computed(decode_V, context.prefill_rows)
        seconds = float(self._seconds(context, computed_V[:1])[0])
        off = Weighed(context.decoding / seconds, seconds, None, context.decoding)
        lacking = self._missing(context, "", (0,), (0,), decode_V[:1])
        ready, waiting = ([], [off]) if lacking.any() else ([off], [])
        held = off if self._current is None and ready else NONE
        for d, estimate in enumerate(self._estimates if len(decode_V) > 1 else ()):
            if not context.taking(self._names[d]):
                continue
            rate_DWV, seconds_DWV = self._rates(d, estimate, context, decode_V, computed_V)
            lacks_DWV = self._missing(
                context, self._names[d], estimate.depths, estimate.widths, decode_V[1:]
            )
            if lacks_DWV.any():
                lacks_DWV = np.broadcast_to(lacks_DWV > 0, rate_DWV.shape)
                later_DWV = np.where(lacks_DWV, rate_DWV, 0.0)
                waiting.append(self._best(d, later_DWV, seconds_DWV, decode_V))
                rate_DWV = np.where(lacks_DWV, 0.0, rate_DWV)
            ready.append(self._best(d, rate_DWV, seconds_DWV, decode_V))
            now = self._current
            if now is not None and now.drafter == d:
                i, j = estimate.depths.index(now.depth), estimate.widths.index(now.width)
                v = int(rate_DWV[i, j].argmax())
                rows = int(decode_V[1 + v])
                held = Weighed(float(rate_DWV[i, j, v]), float(seconds_DWV[i, j, v]), now, rows)
        return ready, held, waiting

    def _best(
        self,
        d: int,
        rate_DWV: NDArray[np.float64],
        seconds_DWV: NDArray[np.float64],
        decode_V: NDArray[np.int64],
    ) -> Weighed:
        i, j, v = np.unravel_index(int(rate_DWV.argmax()), rate_DWV.shape)
        pick = TreeShape(d, self._estimates[d].depths[i], self._estimates[d].widths[j])
        rows = int(decode_V[1 + v])
        return Weighed(float(rate_DWV[i, j, v]), float(seconds_DWV[i, j, v]), pick, rows)

    def _missing(
        self,
        context: StepContext,
        drafter: str,
        depths: tuple[int, ...],
        widths: tuple[int, ...],
        decode_V: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        if self._recordings is None:
            return NOTHING_111
        return self._recordings.missing(context, drafter, depths, widths, decode_V)

    def _records(self, context: StepContext, late: Weighed, held: Weighed) -> bool:
        """Return True if a choice without graphs has been better for long enough to capture it
        now.
        """
        assert self._recordings is not None, "only recordings make a choice wait"
        saved_s = held.seconds * (1 - held.rate / late.rate)
        return self._recordings.want(context, self._strategy(late, context), saved_s)

    def observe(self, cycle: Cycle) -> None:
        """Do nothing: the engine's knowledge has recorded the step."""

    def strategies(self, requests: range, *, prompts: bool) -> Iterator[Strategy]:
        decode_V = self._sizes.decode_rows(requests[-1], prompts=prompts)
        yield OFF
        for d, estimate in enumerate(self._estimates):
            for i, j in np.argwhere(_sensible(estimate, decode_V) & self._allowed[d]):
                tree = TreeShape(d, estimate.depths[i], estimate.widths[j])
                for count in dict.fromkeys((requests[0], requests[-1])):
                    for rows in decode_V[1:]:
                        yield self._of_rows(tree, int(rows), count, prompts=prompts)

    def gauges(self) -> Mapping[str, float]:
        return {
            "goodput_expected": self._expected,
            "goodput_switches": self._switches,
            "goodput_choice_us": self._choice_us,
        }

    def _hurdle(self, pick: TreeShape | None) -> float:
        now = self._current
        same = pick is not None and now is not None and pick.drafter == now.drafter
        return self._settings.margin if same else self._settings.change

    def _rates(
        self,
        d: int,
        estimate: AcceptanceEstimate,
        context: StepContext,
        decode_V: NDArray[np.int64],
        computed_V: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the expected tokens per second, and the seconds, for every depth, width and number
        of decode rows except the first.
        """
        requests = context.taking(self._names[d])
        shapes = self._shapes_of(d, estimate, context, requests, decode_V)
        seconds_DWV = self._seconds(
            context, computed_V[1:], self._names[d], shapes.depth_D11, shapes.width_1W1
        )
        rate_DWV = estimate.gains_at(shapes.points_V)
        rate_DWV *= requests
        rate_DWV += context.decoding
        rate_DWV *= shapes.useful_DWV
        rate_DWV /= seconds_DWV
        return rate_DWV, np.broadcast_to(seconds_DWV, rate_DWV.shape)

    def _shapes_of(
        self,
        d: int,
        estimate: AcceptanceEstimate,
        context: StepContext,
        requests: int,
        decode_V: NDArray[np.int64],
    ) -> StepShapes:
        """Return the shapes of a kind of step. They do not depend on learned numbers, and many
        steps are of one kind.
        """
        key = (
            *(d, requests, context.decoding, context.prefill_rows > 0),
            *(context.most_drafts, context.deepest),
        )
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= KEPT_SHAPES:
                self._shapes.clear()
            found = StepShapes.of(estimate, context, requests, decode_V, self._allowed[d])
            self._shapes[key] = found
        return found

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

    def _strategy(self, choice: Weighed, context: StepContext) -> Strategy:
        if choice.pick is None:
            return OFF
        prompts = context.prefill_rows > 0
        return self._of_rows(choice.pick, choice.rows, context.decoding, prompts=prompts)

    def _of_rows(self, tree: TreeShape, rows: int, requests: int, *, prompts: bool) -> Strategy:
        budget = max(1, rows - self._sizes.batch(requests, prompts=prompts))
        mean = 1 + -(-(rows - requests) // requests)
        return Strategy(self._names[tree.drafter], tree.depth, tree.width, mean, budget)


def _allowed(drafter: str, estimate: AcceptanceEstimate, arms: Arms | None) -> NDArray[np.bool_]:
    """Return a mask, by depth and width, of the trees that an operator allows."""
    permitted = [
        [arms is None or arms.permit(drafter, depth, width) for width in estimate.widths]
        for depth in estimate.depths
    ]
    return np.array(permitted)


def _nodes(depth: NDArray[np.int64], width: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the maximum number of nodes in a request's tree with its branch."""
    found: NDArray[np.int64] = width + (depth - 1) * width**2 + depth
    return found


def _sensible(estimate: AcceptanceEstimate, decode_V: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask, by depth and width, of the trees that such a step can use. `decode_V`: its
    possible numbers of decode rows; the first has no drafts.
    """
    roots, most = int(decode_V[0]), int(decode_V[-1])
    depth_D, width_W = np.array(estimate.depths), np.array(estimate.widths)
    deep_D = (depth_D == 1) | (roots * depth_D <= DEEPEST * most)
    broad_DW = (width_W == 1) | (
        (roots * width_W <= most // BROADEST) & (width_W <= depth_D[:, None])
    )
    return deep_D[:, None] & broad_DW
