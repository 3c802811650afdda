"""Grafting: a chain of tokens from another drafter becomes a branch of a request's tree.

Slow twin: `tests/unit/test_branches.py`. Legend: N nodes of trees, H nodes of chains, B requests.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.compiled import kernel


@njit(cache=True)
def _families(request_N, parent_N, requests):
    """Return (first_F, next_N): the last child of each family, and the sibling before each node; -1
    = none. Family n < N has the children of node n, family N + b those of request b's root.
    """
    nodes = len(request_N)
    first_F = np.full(nodes + requests, -1, np.int32)
    next_N = np.empty(nodes, np.int32)
    for n in range(nodes):
        family = parent_N[n] if parent_N[n] >= 0 else nodes + request_N[n]
        next_N[n] = first_F[family]
        first_F[family] = n
    return first_F, next_N


@kernel(
    "(i4[::1], i4[::1], i4[::1], f4[::1], i4[::1], i4[::1], i4[::1], i8, i8, f4, i8, "
    "f4[::1], i4[::1], i4[::1], f4[::1], i4[::1])"
)
def graft(
    request_N,
    parent_N,
    token_N,
    acceptance_N,
    request_H,
    token_H,
    trust_H,
    requests,
    lefts,
    floor,
    first_cell,
    table_Z,
    branch_H,
    above_H,
    acceptance_H,
    cell_H,
):
    """Return the number of new nodes. A chain is one request's contiguous nodes from the root on.
    It follows the tree while its tokens are in it, then branches off once.

    trust_H: the index of each node's evidence. left: the share of the parent's acceptance
    probability that its children in the tree leave over, in `lefts` buckets. Conditional
    probability of a branch's node: table_Z at trust * lefts + bucket of left. New node i is chain
    node branch_H[i]; above_H[i] is its parent, N + j for new node j, -1 for the root. A branch ends
    where its acceptance probability is below `floor`.
    """
    first_F, next_N = _families(request_N, parent_N, requests)
    nodes = len(request_N)
    count = 0
    at, above, ended = -1, np.float32(1), False
    for h in range(len(request_H)):
        if h == 0 or request_H[h] != request_H[h - 1]:
            at, above, ended = -1, np.float32(1), False
        if ended:
            continue
        left = lefts - 1
        if at < nodes:
            taken = np.float32(0)
            found = -1
            n = first_F[at if at >= 0 else nodes + request_H[h]]
            while n >= 0:
                taken += acceptance_N[n]
                if token_N[n] == token_H[h]:
                    found = n
                n = next_N[n]
            if found >= 0:
                at, above = found, acceptance_N[found]
                continue
            rest = max(np.float32(0), above - taken)
            left = min(int(lefts * rest / max(above, np.float32(1e-9))), lefts - 1)
        cell = trust_H[h] * lefts + left
        acceptance = above * min(max(table_Z[cell], np.float32(0)), np.float32(1))
        if acceptance < floor:
            ended = True
            continue
        branch_H[count], above_H[count] = h, at
        acceptance_H[count], cell_H[count] = acceptance, first_cell + cell
        at, above = nodes + count, acceptance
        count += 1
    return count
