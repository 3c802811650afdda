"""Draft trees on the CPU: keeps the best R nodes of a batch, and walks a verified tree.

Trees are flat arrays with parents before children (see `tlt_server.speculation.batch.Candidates`).
Everything is linear in the number of nodes: the top-R cut is a three-pass radix select on the bits
of the acceptance probability, which as a non-negative float32 has the order of its integer bits.
Slow twins: `tests/unit/test_tree.py`, `tests/unit/test_accept.py`.

Legend: N candidate nodes, M chosen nodes, B requests, R target rows, A accepted rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.compiled import kernel

RADIX = 11  # bits per pass; three passes cover 32


@njit(cache=True)
def kth_largest(value_N, count, k):
    """Return (t, room): the bits t of the k-th largest of the first `count` float32 values, and the
    number of values equal to t among the k largest.
    """
    bits_N = value_N[:count].view(np.uint32)
    remaining = k
    prefix = np.uint32(0)
    mask = np.uint32(0)
    for shift in (21, 10, 0):
        width = RADIX if shift else 10
        histogram = np.zeros(1 << RADIX, np.int32)
        low = np.uint32((1 << width) - 1)
        for n in range(count):
            if bits_N[n] & mask == prefix:
                histogram[(bits_N[n] >> np.uint32(shift)) & low] += 1
        digit = (1 << width) - 1
        while histogram[digit] < remaining and digit > 0:
            remaining -= histogram[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= low << np.uint32(shift)
    return prefix, remaining


@kernel("(i4[::1], f4[::1])")
def capped(parent_N, acceptance_N):
    """Return the acceptance probabilities, none negative, NaN or above its parent's."""
    capped_N = np.empty(len(parent_N), np.float32)
    for n in range(len(parent_N)):
        acceptance = acceptance_N[n]
        if not acceptance >= 0:  # also NaN
            acceptance = np.float32(0)
        if parent_N[n] >= 0 and acceptance > capped_N[parent_N[n]]:
            acceptance = capped_N[parent_N[n]]
        capped_N[n] = acceptance + np.float32(0)  # -0.0 has the bits of a large number
    return capped_N


@njit(cache=True)
def _choose(capped_N, depth_N, kept):
    """Mark the `kept` best nodes; of equal nodes, the shallowest, then the first."""
    nodes = len(capped_N)
    chosen_N = np.zeros(nodes, np.bool_)
    threshold, room = kth_largest(capped_N, nodes, kept)
    bits_N = capped_N.view(np.uint32)
    deepest = 0
    for n in range(nodes):
        if bits_N[n] > threshold:
            chosen_N[n] = True
        elif bits_N[n] == threshold:
            deepest = max(deepest, depth_N[n])
    for depth in range(deepest + 1):
        if room == 0:
            break
        for n in range(nodes):
            if room > 0 and bits_N[n] == threshold and depth_N[n] == depth:
                chosen_N[n] = True
                room -= 1
    return chosen_N


@kernel("(i4[::1], i4[::1], i4[::1], f4[::1], i8, i8)")
def select(request_N, parent_N, depth_N, acceptance_N, requests, budget):
    """Return (node_M, parent_M, count_B): the `budget` best nodes by (acceptance probability,
    shallowest, first), grouped by request.

    parent_M indexes into M, -1 = root. A probability above the parent's is cut to it, so the choice
    is closed under ancestors.
    """
    nodes = len(request_N)
    count_B = np.zeros(requests, np.int32)
    kept = min(budget, nodes)
    node_M = np.empty(max(kept, 0), np.int32)
    parent_M = np.empty(max(kept, 0), np.int32)
    if kept <= 0:
        return node_M, parent_M, count_B
    if kept == nodes:
        chosen_N = np.ones(nodes, np.bool_)
    else:
        chosen_N = _choose(capped(parent_N, acceptance_N), depth_N, kept)
    for n in range(nodes):
        if chosen_N[n]:
            count_B[request_N[n]] += 1
    next_B = np.empty(requests, np.int32)
    start = 0
    for b in range(requests):
        next_B[b] = start
        start += count_B[b]
    index_N = np.empty(nodes, np.int32)
    for n in range(nodes):
        if chosen_N[n]:
            index = next_B[request_N[n]]
            next_B[request_N[n]] += 1
            index_N[n] = index
            node_M[index] = n
            parent_M[index] = index_N[parent_N[n]] if parent_N[n] >= 0 else -1
    return node_M, parent_M, count_B


@kernel("(i4[::1], i4[::1], i4[::1], i8[::1], i4[::1])")
def walk(row_start_B, row_count_B, parent_row_R, token_R, sampled_R):
    """Return (row_A, length_B, token_E): accepted rows, their number per request, and the emitted
    tokens (length + 1 per request).
    """
    requests = len(row_start_B)
    row_A = np.empty(len(token_R), np.int32)
    length_B = np.zeros(requests, np.int32)
    token_E = np.empty(len(token_R) + requests, np.int32)
    accepted = 0
    emitted = 0
    for b in range(requests):
        at = row_start_B[b]
        end = at + row_count_B[b]
        token_E[emitted] = sampled_R[at]
        emitted += 1
        for row in range(at + 1, end):  # parents come first, so one pass follows the path
            if parent_row_R[row] == at and token_R[row] == sampled_R[at]:
                at = row
                row_A[accepted] = row
                accepted += 1
                length_B[b] += 1
                token_E[emitted] = sampled_R[row]
                emitted += 1
    return row_A[:accepted], length_B, token_E[:emitted]
