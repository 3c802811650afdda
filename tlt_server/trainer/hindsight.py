"""The regret of adoptions: what the drafters in force cost against the best ones in hindsight.

Exact, since every candidate is replayed on every step's responses. Costs are cycles or
milliseconds. Legend: S steps, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Regret(NamedTuple):
    """Shares of what the best choices would have cost."""

    of_steps: float  # against the best candidate of each step among those that existed
    of_run: float  # against the one candidate that is best over all steps; below 0: better than it
    lost_S: NDArray[np.float64]  # cost above the best of each step


def regret(
    cost_SK: NDArray[np.float64],
    adopted_S: NDArray[np.int64],
    made_K: NDArray[np.int64] | None = None,
) -> Regret:
    """Judge a sequence of adoptions. cost_SK: each candidate on the responses of each step.
    adopted_S: the candidate in force. made_K: the first step at which each existed; None: from the
    start on.

    `ValueError` where a candidate was in force before it existed, or a cost is not positive.
    """
    steps, candidates = cost_SK.shape
    made_K = np.zeros(candidates, np.int64) if made_K is None else made_K
    if not (np.isfinite(cost_SK) & (cost_SK > 0)).all():
        raise ValueError("cost_SK must be positive numbers: replay every candidate on every step")
    if len(adopted_S) != steps or not ((adopted_S >= 0) & (adopted_S < candidates)).all():
        raise ValueError(f"adopted_S must name one of {candidates} candidates for {steps} steps")
    early_S = made_K[adopted_S] > np.arange(steps)
    if early_S.any():
        step = int(early_S.argmax())
        raise ValueError(
            f"candidate {adopted_S[step]} is in force at step {step} and made at step "
            f"{made_K[adopted_S[step]]}"
        )
    spent_S = cost_SK[np.arange(steps), adopted_S]
    existed_SK = made_K <= np.arange(steps)[:, None]
    best_S = np.where(existed_SK, cost_SK, np.inf).min(axis=1)
    return Regret(
        float(spent_S.sum() / best_S.sum() - 1),
        float(spent_S.sum() / cost_SK.sum(axis=0).min() - 1),
        spent_S - best_S,
    )
