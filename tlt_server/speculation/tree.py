"""The choice of draft rows to verify: the best R nodes over batch x nodes.

Candidates come from any drafter; the scheduler grants `budget` rows, and each request also has its
root. Maximising the sum of acceptance probabilities maximises the expected number of accepted
tokens of the batch. A node's probability never exceeds its parent's, so the best R nodes form whole
trees: long stragglers and confident requests get more rows by themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.cpu import tree as kernels
from tlt_server.speculation.batch import Candidates


class Selection(NamedTuple):
    """Chosen nodes, grouped by request in ascending order, parents before children."""

    node_M: NDArray[np.int32]  # index into the candidates
    parent_M: NDArray[np.int32]  # index into M, -1 = the request's root
    count_B: NDArray[np.int32]  # chosen nodes per request


def select(
    candidates: Candidates, requests: int, budget: int, most_B: NDArray[np.int32] | None = None
) -> Selection:
    """Return the `budget` candidates most likely to be accepted; ties go to the shallower, then to
    the earlier node. The choice is closed under ancestors.

    `budget` counts the draft rows of the whole batch without roots; `most_B` limits those of each
    request.
    """
    if most_B is not None:
        return _select_within(candidates, requests, budget, most_B)
    return Selection(
        *kernels.select(
            candidates.request_N,
            candidates.parent_N,
            candidates.depth_N,
            candidates.acceptance_N,
            requests,
            budget,
        )
    )


def _select_within(
    candidates: Candidates, requests: int, budget: int, most_B: NDArray[np.int32]
) -> Selection:
    """Choose among each request's best nodes, which form a tree."""
    capped_N = kernels.capped(candidates.parent_N, candidates.acceptance_N)
    index_N = np.arange(len(candidates), dtype=np.int32)
    order = np.lexsort((index_N, candidates.depth_N, -capped_N, candidates.request_N))
    owner = candidates.request_N[order]
    first = np.searchsorted(owner, owner)
    kept_K = np.sort(order[index_N - first < most_B[owner]])
    place_N = np.full(len(candidates) + 1, -1, np.int32)  # the last one is of the root, -1
    place_N[kept_K] = index_N[: len(kept_K)]
    few = Candidates(
        candidates.request_N[kept_K],
        place_N[candidates.parent_N[kept_K]],
        candidates.token_N[kept_K],
        candidates.depth_N[kept_K],
        candidates.rank_N[kept_K],
        capped_N[kept_K],
    )
    chosen = select(few, requests, budget)
    return chosen._replace(node_M=kept_K[chosen.node_M].astype(np.int32))
