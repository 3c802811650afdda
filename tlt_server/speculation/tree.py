"""The choice of draft rows to verify: the best R nodes over batch x nodes.

Candidates come from any drafter; the scheduler asks for `budget` rows and each request also has its
root. Maximising the sum of survivals is maximising the expected number of accepted tokens of the
batch, and since a node never survives better than its parent, the best R nodes are whole trees:
long stragglers and confident requests get more rows by themselves.
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


def select(candidates: Candidates, requests: int, budget: int) -> Selection:
    """Return the `budget` candidates most likely to be accepted; ties go to the shallower, then to
    the earlier node.

    `budget` counts draft rows of the whole batch, not roots. Closed under ancestors.
    """
    return Selection(
        *kernels.select(
            candidates.request_N,
            candidates.parent_N,
            candidates.depth_N,
            candidates.survival_N,
            requests,
            budget,
        )
    )
