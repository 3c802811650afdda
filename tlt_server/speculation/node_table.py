"""Converts the table of nodes that a GPU fills into the flat arrays of `batch.Candidates`.

Legend: T entries of the table, request after request, N nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.branches import RANK

Integers = NDArray[np.int32]


def candidates_of(
    columns: int,
    own_columns: int,
    parent_T: Integers,
    depth_T: Integers,
    acceptance_T: NDArray[np.float32],
    token_T: Integers | None = None,
    cell_T: Integers | None = None,
) -> Candidates:
    """Return the nodes of a table with `columns` entries per request; entries from `own_columns` on
    are branches. A negative probability marks an empty entry. Tokens default to 0.
    """
    live = np.flatnonzero(acceptance_T >= 0)
    request_N = (live // columns).astype(np.int32)
    index_T = np.full(len(acceptance_T), -1, np.int32)
    index_T[live] = np.arange(len(live), dtype=np.int32)
    above = parent_T[live]
    parent_N = np.where(above >= 0, index_T[request_N * columns + above], -1).astype(np.int32)
    own_N = live % columns < own_columns
    rank_N = np.full(len(live), RANK, np.int32)
    rank_N[own_N] = _ranks(request_N[own_N], parent_N[own_N])
    return Candidates(
        request_N,
        parent_N,
        parent_N * 0 if token_T is None else token_T[live],
        depth_T[live],
        rank_N,
        acceptance_T[live],
        np.zeros(0, np.int32) if cell_T is None else cell_T[live],
    )


def _ranks(request_N: Integers, parent_N: Integers) -> Integers:
    """Return each node's index among its siblings, which are in rank order."""
    family_N = np.where(parent_N >= 0, parent_N + request_N.max(initial=0) + 1, request_N)
    order = np.argsort(family_N, kind="stable")
    ordered = family_N[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    first = np.repeat(starts, np.diff(np.append(starts, len(ordered))))
    rank_N = np.empty(len(parent_N), np.int32)
    rank_N[order] = np.arange(len(ordered)) - first
    return rank_N
