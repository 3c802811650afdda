"""Accept-iff-equal: which draft rows of a verified tree become output.

Theorem. With keyed noise, the target's token after a prefix is a function of (weights, prefix,
sampling parameters, seed). By induction along the walk: the root row's prefix is that of plain
decoding, so `sampled[root]` is plain decoding's next token. If a child row carries that token, its
prefix is again plain decoding's, and so is `sampled[child]`. If no child carries it, the sampled
token is emitted and the next cycle continues from it. So for every tree, drafter and order of rows,
the emitted tokens are those of plain decoding; drafts decide only how many tokens a cycle yields.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.cpu import tree as kernels
from tlt_server.speculation.batch import Candidates


class Walk(NamedTuple):
    """Flat and grouped by request, in path order. Request b has length_B[b] accepted rows and
    length_B[b] + 1 emitted tokens.
    """

    row_A: NDArray[np.int32]  # accepted draft rows (the root is not among them)
    length_B: NDArray[np.int32]
    token_E: NDArray[np.int32]  # accepted tokens, then the bonus token; E = A + B


def accept(
    row_start_B: NDArray[np.int32],
    row_count_B: NDArray[np.int32],
    parent_row_R: NDArray[np.int32],
    token_R: NDArray[np.int64],
    sampled_R: NDArray[np.int32],
) -> Walk:
    """Walk each request's tree from its root row.

    Rows of request b are [row_start_B[b], row_start_B[b] + row_count_B[b]): the root first (its
    parent is not read), then draft rows. Each follows its parent row, `parent_row_R`, an index into
    R. `sampled_R` is the target's token after each row. Of two children with the same token, the
    first one is followed.
    """
    return Walk(*kernels.walk(row_start_B, row_count_B, parent_row_R, token_R, sampled_R))


def on_path(candidates: Candidates, follow_BD: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask [N] of the nodes on the path of a known response. follow_BD: the response's
    tokens after each root, -1 after its end; deeper nodes are not on the path.
    """
    own_N = np.zeros(len(candidates), np.bool_)
    for depth in range(1, min(int(candidates.depth_N.max(initial=0)), follow_BD.shape[1]) + 1):
        at = np.flatnonzero(candidates.depth_N == depth)
        token, parent = candidates.token_N[at], candidates.parent_N[at]
        same = (token == follow_BD[candidates.request_N[at], depth - 1]) & (token >= 0)
        own_N[at] = same & ((parent < 0) | own_N[parent])
    return own_N


def accepted_drafts(
    candidates: Candidates, node_M: NDArray[np.int32], own_N: NDArray[np.bool_], requests: int
) -> NDArray[np.int32]:
    """Return the number of accepted drafts per request if these nodes are verified. It equals the
    length of `accept`'s walk, since siblings differ and `own_N` is `on_path`.
    """
    owner_M = candidates.request_N[node_M[own_N[node_M]]]
    return np.bincount(owner_M, minlength=requests).astype(np.int32)
