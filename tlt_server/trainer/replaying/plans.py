"""Plans of a replay: a pinned strategy at every root, or the strategy and rows that a server had.

If rows were decided for a whole batch, the record has the rows of every verification, and a replay
uses as many of that root's best nodes.

Legend: B roots, V verifications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_server.samples.samples import Verifications
from tlt_server.wire.records import Strategy

_REQUEST = 1 << 32  # positions of one response, in a key of (response, position)


def usual_tree(drafter: str) -> Strategy:
    """Return the tree shape of trials, calibrations and exports."""
    return Strategy(drafter, depth=7, width=4, rows=16)


class PlannedRoots(NamedTuple):
    strategy_B: NDArray[np.int64]  # index into the plan's strategies
    rows_B: NDArray[np.int32]  # the drafter's own and the root; 0: it did not draft here
    next_B: NDArray[np.int64]  # the next root, where it did not draft


class RootPlan(Protocol):
    @property
    def strategies(self) -> Sequence[Strategy]: ...

    @property
    def floored(self) -> bool:
        """Return True if chains end where they would in serving; see `DraftReplay.accepted`."""

    def first(
        self, response_B: NDArray[np.int64], output_B: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the first roots. output_B: positions of the first output tokens."""

    def at(self, response_B: NDArray[np.int64], root_B: NDArray[np.int64]) -> PlannedRoots: ...


class PinnedPlan:
    """The same depth, width and rows at every root."""

    def __init__(self, strategy: Strategy, *, floored: bool = True) -> None:
        self.floored = floored
        self.strategies: Sequence[Strategy] = (strategy,)

    def first(
        self, response_B: NDArray[np.int64], output_B: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return output_B

    def at(self, response_B: NDArray[np.int64], root_B: NDArray[np.int64]) -> PlannedRoots:
        rows_B = np.full(len(root_B), self.strategies[0].rows, np.int32)
        return PlannedRoots(np.zeros(len(root_B), np.int64), rows_B, root_B)


class RecordedPlan:
    """The strategy and rows of the last recorded root up to each position. `kind`: the drafter, as
    named in strategies. Roots of other drafters are skipped.
    """

    floored = False  # as many rows as are recorded had survived

    def __init__(self, strategies: Sequence[Strategy], verified: Verifications, kind: str) -> None:
        self.strategies = strategies
        key_V = verified.request_V.astype(np.int64) * _REQUEST + verified.root_V
        order = np.argsort(key_V, kind="stable")
        self._key_V, self._request_V = key_V[order], verified.request_V[order]
        self._strategy_V = verified.strategy_V[order].astype(np.int64)
        self._rows_V = own_rows(strategies, verified, kind)[order]
        self._next_V = (verified.root_V.astype(np.int64) + verified.accepted_V + 1)[order]

    def first(
        self, response_B: NDArray[np.int64], output_B: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the first roots. A server drafts for the first output token, too, if all of the
        prompt but its last token was cached.
        """
        at_B = np.searchsorted(self._key_V, response_B * _REQUEST + output_B - 1)
        at_B = np.minimum(at_B, len(self._key_V) - 1)
        cached_B = self._key_V[at_B] == response_B * _REQUEST + output_B - 1
        return output_B - cached_B

    def at(self, response_B: NDArray[np.int64], root_B: NDArray[np.int64]) -> PlannedRoots:
        at_B = np.searchsorted(self._key_V, response_B * _REQUEST + root_B, "right") - 1
        before_B = np.maximum(at_B, 0)
        known_B = (at_B >= 0) & (self._request_V[before_B] == response_B)
        rows_B = np.where(known_B, self._rows_V[before_B], 0).astype(np.int32)
        next_B = np.maximum(root_B + 1, np.where(known_B, self._next_V[before_B], 0))
        return PlannedRoots(self._strategy_V[before_B], rows_B, next_B)


def own_rows(
    strategies: Sequence[Strategy], verified: Verifications, kind: str
) -> NDArray[np.int32]:
    """Return the number of rows from the drafter itself, plus the root, per verification; 0 if
    another drafter or none was used.
    """
    asked = np.array([strategy.drafter == kind for strategy in strategies], np.bool_)
    own_V = np.where(verified.own_rows_V > 0, verified.own_rows_V, verified.rows_V)
    return np.where(asked[verified.strategy_V], own_V, 0).astype(np.int32)
