"""Expected numbers of accepted draft tokens, also for strategies that did not run.

Every node of a drafted tree carries its acceptance probability: how likely it is on the path of the
target's tokens. The expected number of accepted tokens of any set of nodes is the sum of these
probabilities. So one tree of depth 7 predicts the gain of every shallower, narrower or smaller
tree, and no trial runs are needed. A cut or shallower tree is extended from its leaves by the
drafter's mean probability from level to level. Branches of another drafter (rank -1) count
unchanged, in trees of every width that contain their parents.

The builder verifies the R best nodes of a batch, so the gain of R rows is the sum of the R largest
probabilities. It is kept as a curve over nodes per request, for each depth and width, averaged over
recent trees. Predicted gains are compared with accepted tokens, and scaled by the ratio.

No torch. Legend: N nodes, D depths, W widths, X points of a curve.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.learnt import DOUBT
from tlt_server.speculation.sizes import POINTS

_POINT_X = np.array(POINTS, np.float64)
MOST = 2.0  # accepted over predicted, of one step
ROUNDING = 1e-6


@dataclass(frozen=True)
class EstimateSettings:
    # Acceptance from level to level before any tree: optimistic, so that one is drafted.
    prior: float = 0.9
    memory: float = 96.0  # trees of one request that a curve is the mean of, older ones fading
    every: int = 8  # steps of which the trees of one are looked at
    fade: float = 0.02  # share of the ratio that a step replaces
    doubt: int = 256  # steps without a tree after which half of what was seen is doubted


class CurvePoints(NamedTuple):
    """Positions between the points of a curve."""

    above: NDArray[np.int64]  # the next point
    share: NDArray[np.float64]  # its weight

    @classmethod
    def of(cls, nodes: NDArray[np.float64]) -> CurvePoints:
        """Return the curve positions of these numbers of draft rows per request."""
        nodes = np.minimum(nodes, POINTS[-1])
        above = np.clip(np.searchsorted(_POINT_X, nodes), 1, len(POINTS) - 1)
        below_X = _POINT_X[above - 1]
        return cls(above, (nodes - below_X) / (_POINT_X[above] - below_X))


class EstimateRecord(Struct, frozen=True, forbid_unknown_fields=True):
    depths: list[int]
    widths: list[int]
    curves: list[float]
    requests: float
    rate: float
    ratio: float


class AcceptanceEstimate:
    """The expected gains of one drafter."""

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        settings: EstimateSettings = EstimateSettings(),
    ) -> None:
        self.depths, self.widths, self._settings = tuple(depths), tuple(widths), settings
        self._prior_DWX = self._prior()
        self._seen_DWX = self.curve_DWX = self._prior_DWX
        self._requests = 0.0  # trees of one request that were seen, older ones fading
        self._rate = settings.prior  # mean acceptance of best children
        self._unseen = 0  # steps since the last tree
        self.ratio = 1.0  # accepted over predicted

    def gains(self, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected accepted draft tokens per request, [D, W, len(nodes)], for these
        numbers of draft rows per request.
        """
        return self.gains_at(CurvePoints.of(nodes))

    def gains_at(self, points: CurvePoints) -> NDArray[np.float64]:
        curve_DWX, above, share = self.curve_DWX, points.above, points.share
        found: NDArray[np.float64] = curve_DWX[..., above - 1] * (1 - share)
        found += curve_DWX[..., above] * share
        found *= self.ratio
        return found

    def gain(self, depth: int, width: int, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gains of this depth and width; an unknown one counts as the next smaller known
        one.
        """
        d, w = bisect_right(self.depths, depth) - 1, bisect_right(self.widths, width) - 1
        return self.gains(nodes)[max(0, d), max(0, w)]

    def see(self, drafted: Candidates, requests: int) -> None:
        """Add a step's drafted trees to the estimate."""
        if not len(drafted) or not requests:
            return
        fresh = requests / (self._requests + requests)
        self._requests = min(self._requests + requests, self._settings.memory)
        trees = _Trees(drafted)
        self._rate += fresh * (trees.rate - self._rate)
        self._seen_DWX = self._seen_DWX + fresh * (self._curves(trees, requests) - self._seen_DWX)
        self.curve_DWX, self._unseen = self._seen_DWX, 0

    def verified(self, predicted: float, accepted: float) -> None:
        """Compare the expected with the actual number of accepted tokens of the verified nodes."""
        if predicted > 0:
            weight = self._settings.fade * min(1.0, predicted / 4)
            self.ratio += weight * (min(MOST, accepted / predicted) - self.ratio)

    @property
    def due(self) -> bool:
        """Return True if the next step's trees should be added. A curve takes 0.1 ms, so once the
        mean covers enough trees, one step in `every` is enough.
        """
        return self._requests < self._settings.memory or self._unseen >= self._settings.every - 1

    def unseen(self) -> None:
        """Record a step whose trees were not added: the estimate ages."""
        self._unseen += 1
        if self._requests and self._unseen % 16 == 0:
            known = 0.5 ** (self._unseen / self._settings.doubt)
            hope_DWX = np.maximum(self._prior_DWX, self._seen_DWX)
            self.curve_DWX = known * self._seen_DWX + (1 - known) * hope_DWX

    def forget(self) -> None:
        """Discount past observations after a weight change; the next trees weigh more."""
        self._requests, self.ratio = self._requests / DOUBT, 1.0

    def record(self) -> EstimateRecord:
        return EstimateRecord(
            [*self.depths],
            [*self.widths],
            self._seen_DWX.reshape(-1).tolist(),
            self._requests,
            self._rate,
            self.ratio,
        )

    def check(self, record: EstimateRecord) -> None:
        """Raise `ValueError` unless the record has this estimate's form."""
        curve_TX = np.array(record.curves[: self._prior_DWX.size]).reshape(-1, len(POINTS))
        if (  # a node brings one token at most
            tuple(record.depths) != self.depths
            or tuple(record.widths) != self.widths
            or len(record.curves) != self._prior_DWX.size
            or not ((curve_TX >= 0) & (curve_TX <= _POINT_X + ROUNDING)).all()
            or not 0 <= record.requests <= self._settings.memory
            or not 0 <= record.rate < 1
            or not 0 <= record.ratio <= MOST
        ):
            raise ValueError(
                "the acceptance estimate of a drafter has another form than this version writes"
            )

    def restore(self, record: EstimateRecord) -> None:
        self._seen_DWX = self.curve_DWX = np.array(record.curves).reshape(self._prior_DWX.shape)
        self._requests, self._rate, self.ratio = record.requests, record.rate, record.ratio
        self._unseen = 0

    def _prior(self) -> NDArray[np.float64]:
        curve_DWX = np.zeros((len(self.depths), len(self.widths), len(POINTS)))
        for d, depth in enumerate(self.depths):
            chain = np.cumsum(self._settings.prior ** np.arange(1, depth + 1))
            curve_DWX[d] = np.interp(POINTS, np.arange(depth + 1), np.array([0.0, *chain]))
        return curve_DWX

    def _curves(self, trees: _Trees, requests: int) -> NDArray[np.float64]:
        curve_DWX = np.zeros((len(self.depths), len(self.widths), len(POINTS)))
        for w, width in enumerate(self.widths):
            for d, depth in enumerate(self.depths):
                acceptance_N = np.sort(trees.within(depth, width, self._rate))[::-1]
                total_N = np.concatenate(([0.0], np.cumsum(acceptance_N)))
                at_X = np.array(POINTS) * requests
                curve_DWX[d, w] = np.interp(at_X, np.arange(len(total_N)), total_N) / requests
        return curve_DWX


class _Trees:
    """The draft trees of one step."""

    def __init__(self, drafted: Candidates) -> None:
        self.acceptance_N = np.clip(drafted.acceptance_N, 0.0, 1.0)
        self.depth_N, self.widest_N = drafted.depth_N, _widest(drafted)
        own_N = drafted.rank_N >= 0  # a branch ends where its source ends, so it is not continued
        leaf_N = drafted.rank_N == 0
        leaf_N[drafted.parent_N[own_N & (drafted.parent_N >= 0)]] = False
        self.leaf_N = leaf_N
        best_N = own_N & (self.widest_N == 0)
        parent_N = drafted.parent_N[best_N]
        above = np.where(parent_N >= 0, self.acceptance_N[parent_N], 1.0).sum()
        self.rate = min(0.99, float(self.acceptance_N[best_N].sum() / max(above, 1e-9)))

    def within(self, depth: int, width: int, rate: float) -> NDArray[np.float32]:
        """Return the acceptance probabilities of the nodes within this depth and width, with
        missing levels extended at `rate`.
        """
        inside_N = (self.depth_N <= depth) & (self.widest_N < width)
        found = [self.acceptance_N[inside_N]]
        leaf_N = inside_N & self.leaf_N
        more, deep = self.acceptance_N[leaf_N], self.depth_N[leaf_N]
        while (goes_on := deep < depth).any():
            more, deep = more[goes_on] * rate, deep[goes_on] + 1
            found.append(more)
        return np.concatenate(found)


def _widest(drafted: Candidates) -> NDArray[np.int32]:
    """Return the largest rank on each node's path. A branch counts as rank 0."""
    widest_N = drafted.rank_N.copy()
    if widest_N.any():
        for depth in range(2, int(drafted.depth_N.max()) + 1):
            at = np.flatnonzero(drafted.depth_N == depth)
            widest_N[at] = np.maximum(widest_N[at], widest_N[drafted.parent_N[at]])
    return widest_N
