"""Reliability of survivals: how often drafts that were predicted to survive with a probability are
accepted, by drafter and depth.

A record says of every drafted node whether the response follows it, verified or not, so all nodes
count. Legend: N nodes, D depths, B bins of the predicted probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.speculation.batch import Candidates

BINS, DEEPEST = 20, 64  # deeper nodes count at this depth


class Curve(NamedTuple):
    """One depth's bins that have nodes."""

    depth: int
    predicted_B: NDArray[np.float64]  # mean of a bin
    accepted_B: NDArray[np.float64]  # share
    nodes_B: NDArray[np.float64]


class Reliability:
    """Sums of nodes, of their survivals and of those accepted, [D, B], by drafter. The nodes of
    branches count as a drafter's own.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = defaultdict(
            lambda: np.zeros((3, DEEPEST + 1, BINS))
        )

    def add(self, drafter: str, candidates: Candidates, own_N: NDArray[np.bool_]) -> None:
        """Count the nodes of a step. own_N: which ones the responses follow."""
        branch_N = candidates.rank_N < 0
        for name, of_N in ((drafter, ~branch_N), (f"branches of {drafter}", branch_N)):
            if not of_N.any():
                continue
            survival_N = candidates.survival_N[of_N].astype(np.float64)
            bin_N = np.minimum((survival_N * BINS).astype(np.int64), BINS - 1)
            at = np.minimum(candidates.depth_N[of_N], DEEPEST), bin_N
            values = (np.ones(len(survival_N)), survival_N, own_N[of_N].astype(np.float64))
            for sums_DB, value_N in zip(self._sums[name], values, strict=True):
                np.add.at(sums_DB, at, value_N)

    @property
    def drafters(self) -> list[str]:
        return [*self._sums]

    def curves(self, drafter: str, fewest: int = 20) -> Iterator[Curve]:
        """Yield the curve of each depth, over bins of at least `fewest` nodes."""
        nodes_DB, predicted_DB, accepted_DB = self._sums[drafter]
        for depth in range(DEEPEST + 1):
            at = np.flatnonzero(nodes_DB[depth] >= fewest)
            if len(at):
                nodes_B = nodes_DB[depth, at]
                yield Curve(
                    depth,
                    predicted_DB[depth, at] / nodes_B,
                    accepted_DB[depth, at] / nodes_B,
                    nodes_B,
                )

    def errors(self) -> dict[str, float]:
        """Return the mean distance of predicted from accepted shares over all nodes, by drafter:
        the expected calibration error.
        """
        return {
            name: float(np.abs(predicted_DB - accepted_DB).sum() / nodes_DB.sum())
            for name, (nodes_DB, predicted_DB, accepted_DB) in self._sums.items()
        }
