"""Best-first growth of a neural draft tree: one kernel call between two forwards of the drafter.

Children of nodes are ranked with the noise that the target will sample with:
z_v = q_v / T + G(seed, position, v) over the draft vocabulary, G keyed by the *target* id;
temperature 0 is z = q. Only differences of z are used, so logits serve as well as
log-probabilities. Most of a large vocabulary is rejected before a logarithm: G > t needs a Philox
word below a tabulated bound, and no G exceeds 22.9.

A round reads the drafter's logits of the rows just run, adds their children, and picks the next
rows: per request, the `width` most probable unexpanded nodes of any depth. It skips nodes whose
children could not be verified anyway (their acceptance probability does not exceed that of the
`budget`-th best node of the batch) and nodes that are not worth a row. Slow twin:
`tests/unit/test_drafters.py`.

Legend: B requests, C nodes per request, R rows of a round, V draft vocabulary, W width, L longest
path, X rows so far.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tlt_kernels.cpu.compiled import kernel
from tlt_kernels.cpu.noise import gumbel_of_word, philox4x32, split_seed
from tlt_kernels.cpu.tree import kth_largest

GUMBEL_LOW, GUMBEL_HIGH = -3.0, 23.0  # every G lies strictly between
STEPS = 16  # table entries per nat
SLACK = 1e-3  # covers float32 rounding of z


def _word_bounds() -> np.ndarray:
    """Return bounds such that G(word) > GUMBEL_LOW + i / STEPS only for word < bounds[i] (uint64;
    one word of slack).
    """
    edge = GUMBEL_LOW + np.arange(int((GUMBEL_HIGH - GUMBEL_LOW) * STEPS) + 1) / STEPS
    uniform = -np.expm1(-np.exp(-edge))
    return np.minimum(np.ceil(uniform * 2.0**32) + 1, 2.0**32).astype(np.uint64)


WORD_BOUNDS = _word_bounds()


@njit(cache=True)
def best_children(logit_V, target_id_V, seed, position, temperature, token_W, z_W):
    """Fill token_W (target ids) and z_W with the best by z, best first. Ties keep the earlier
    index. Return their number.
    """
    width = len(token_W)
    found = 0
    noisy = temperature > 0
    scale = np.float32(1.0) / np.float32(temperature) if noisy else np.float32(1.0)
    k0, k1 = split_seed(seed)
    block = np.int64(-1)
    x0, x1, x2, x3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    for v in range(len(logit_V)):
        z = logit_V[v] * scale
        full = found == width
        if noisy:
            index = 0
            if full:
                missing = z_W[width - 1] - z - SLACK
                if missing > GUMBEL_HIGH:
                    continue
                index = max(0, int((missing - GUMBEL_LOW) * STEPS))
            token = target_id_V[v]
            if token >> 2 != block:
                block = token >> 2
                x0, x1, x2, x3 = philox4x32(k0, k1, np.uint32(block), np.uint32(position))
            lane = token & 3
            word = x0 if lane == 0 else x1 if lane == 1 else x2 if lane == 2 else x3
            if np.uint64(word) > WORD_BOUNDS[index]:
                continue
            z += gumbel_of_word(word)
        if full and not z > z_W[width - 1]:
            continue
        if not full:
            found += 1
        at = found - 1
        while at > 0 and z > z_W[at - 1]:
            z_W[at] = z_W[at - 1]
            token_W[at] = token_W[at - 1]
            at -= 1
        z_W[at] = z
        token_W[at] = target_id_V[v]
    return found


@njit(cache=True)
def children(logit_RV, target_id_V, seed_R, position_R, temperature_R, token_RW, z_RW):
    """Find `best_children` of every row. Missing ones get token -1 and z = -inf."""
    for r in range(len(logit_RV)):
        found = best_children(
            logit_RV[r],
            target_id_V,
            seed_R[r],
            position_R[r],
            temperature_R[r],
            token_RW[r],
            z_RW[r],
        )
        token_RW[r, found:] = -1
        z_RW[r, found:] = -math.inf


@njit(cache=True)
def calibration_cell(phase, rank, gap, edges):
    """Return the index into the flattened [2 phases, 8 ranks, 16 gap buckets] table. A bucket is
    the number of edges below the gap.
    """
    bucket = 0
    while bucket < len(edges) and gap > edges[bucket]:
        bucket += 1
    return (phase * 8 + min(rank, 7)) * 16 + bucket


PARENT, TOKEN, DEPTH, RANK, CELL, SOURCE, KV_SLOT = range(7)  # columns of node_BCI
# SOURCE: row whose hidden state predicted the node. KV_SLOT: where its KV lies, -1 = not expanded.
FIELDS = 7


@njit(cache=True)
def plant(
    logit_RV,
    target_id_V,
    row_request_R,
    row_node_R,
    first_row,
    width,
    root_position_B,
    depth_limit_B,
    seed_B,
    temperature_B,
    acceptance_table,
    gap_edges,
    node_BCI,
    acceptance_BC,
    count_B,
):
    """Append the children of every row to its request's nodes. row_node_R = -1 is the root;
    first_row = X before this round.
    """
    wanted = max(width, 2)  # the best child's gap needs the second
    token_W = np.empty(wanted, np.int64)
    z_W = np.empty(wanted, np.float32)
    for r in range(len(logit_RV)):
        b = row_request_R[r]
        node = row_node_R[r]
        depth = 1 if node < 0 else node_BCI[b, node, DEPTH] + 1
        if depth > depth_limit_B[b]:
            continue
        parent_acceptance = np.float32(1.0) if node < 0 else acceptance_BC[b, node]
        phase = 0 if node < 0 else 1
        position = root_position_B[b] + depth
        found = best_children(
            logit_RV[r], target_id_V, seed_B[b], position, temperature_B[b], token_W, z_W
        )
        for rank in range(min(found, width)):
            other = max(rank, 1)
            gap = z_W[0] - z_W[other] if found > other else np.float32(np.inf)
            cell = calibration_cell(phase, rank, gap, gap_edges)
            at = count_B[b]
            count_B[b] += 1
            node_BCI[b, at, PARENT] = node
            node_BCI[b, at, TOKEN] = token_W[rank]
            node_BCI[b, at, DEPTH] = depth
            node_BCI[b, at, RANK] = rank
            node_BCI[b, at, CELL] = cell
            node_BCI[b, at, SOURCE] = first_row + r
            node_BCI[b, at, KV_SLOT] = -1
            acceptance_BC[b, at] = parent_acceptance * min(
                max(acceptance_table[cell], np.float32(0)), np.float32(1)
            )


@njit(cache=True)
def bar(acceptance_BC, count_B, budget, floor):
    """Return the acceptance probability that a node must exceed for its children to matter."""
    total = 0
    for b in range(len(count_B)):
        total += count_B[b]
    if budget <= 0 or total < budget:
        return floor
    flat_N = np.empty(total, np.float32)
    at = 0
    for b in range(len(count_B)):
        flat_N[at : at + count_B[b]] = acceptance_BC[b, : count_B[b]]
        at += count_B[b]
    bits, _ = kth_largest(flat_N, total, budget)
    flat_N[:1].view(np.uint32)[0] = bits
    return max(floor, flat_N[0])


@njit(cache=True)
def pick(
    width,
    budget,
    floor,
    first_kv_slot,
    root_position_B,
    depth_limit_B,
    node_BCI,
    acceptance_BC,
    count_B,
    row_token_R,
    row_position_R,
    row_kv_slot_R,
    row_request_R,
    row_node_R,
    row_source_R,
    row_path,
    path_length,
):
    """Choose and lay out the next rows; return their number. Row r's scratch KV slot is
    first_kv_slot + r.

    row_path is flat [R * L]: scratch KV slots of the ancestors and of the row itself, root side
    first, -1 padded.
    """
    threshold = bar(acceptance_BC, count_B, budget, floor)
    rows = 0
    for b in range(len(count_B)):
        for _ in range(width):
            best = -1
            for n in range(count_B[b]):
                if (
                    node_BCI[b, n, KV_SLOT] < 0
                    and node_BCI[b, n, DEPTH] < depth_limit_B[b]
                    and acceptance_BC[b, n] > threshold
                    and (best < 0 or acceptance_BC[b, n] > acceptance_BC[b, best])
                ):
                    best = n
            if best < 0:
                break
            kv_slot = first_kv_slot + rows
            node_BCI[b, best, KV_SLOT] = kv_slot
            row_token_R[rows] = node_BCI[b, best, TOKEN]
            row_position_R[rows] = root_position_B[b] + node_BCI[b, best, DEPTH]
            row_kv_slot_R[rows] = kv_slot
            row_request_R[rows] = b
            row_node_R[rows] = best
            row_source_R[rows] = node_BCI[b, best, SOURCE]
            path = row_path[rows * path_length : (rows + 1) * path_length]
            path[:] = -1
            node = best
            while node >= 0:
                path[node_BCI[b, node, DEPTH] - 1] = node_BCI[b, node, KV_SLOT]
                node = node_BCI[b, node, PARENT]
            rows += 1
    return rows


@kernel(
    "(f4[:, ::1], i8[::1], i8, i8, i8, i8, f8, i8, i8[::1], i4[::1], u8[::1], f4[::1], "
    "f4[::1], f4[::1], i4[:, :, ::1], f4[:, ::1], i4[::1], i8[::1], i8[::1], i8[::1], "
    "i4[::1], i4[::1], i8[::1], i4[::1], i8)"
)
def grow(
    logit_RV,
    target_id_V,
    first_row,
    width,
    pick_width,
    budget,
    floor,
    first_kv_slot,
    root_position_B,
    depth_limit_B,
    seed_B,
    temperature_B,
    acceptance_table,
    gap_edges,
    node_BCI,
    acceptance_BC,
    count_B,
    row_token_R,
    row_position_R,
    row_kv_slot_R,
    row_request_R,
    row_node_R,
    row_source_R,
    row_path,
    path_length,
):
    """Run one round: add the children of the rows just run, and pick the next rows (none if
    pick_width is 0).
    """
    plant(
        logit_RV,
        target_id_V,
        row_request_R,
        row_node_R,
        first_row,
        width,
        root_position_B,
        depth_limit_B,
        seed_B,
        temperature_B,
        acceptance_table,
        gap_edges,
        node_BCI,
        acceptance_BC,
        count_B,
    )
    if pick_width == 0:
        return 0
    return pick(
        pick_width,
        budget,
        floor,
        first_kv_slot,
        root_position_B,
        depth_limit_B,
        node_BCI,
        acceptance_BC,
        count_B,
        row_token_R,
        row_position_R,
        row_kv_slot_R,
        row_request_R,
        row_node_R,
        row_source_R,
        row_path,
        path_length,
    )


@kernel("(i4[:, :, ::1], f4[:, ::1], i4[::1])")
def harvest(node_BCI, acceptance_BC, count_B):
    """Return (request_N, parent_N, token_N, depth_N, rank_N, acceptance_N, cell_N): all nodes as
    flat arrays, grouped by request.
    """
    total = 0
    for b in range(len(count_B)):
        total += count_B[b]
    request_N = np.empty(total, np.int32)
    parent_N = np.empty(total, np.int32)
    token_N = np.empty(total, np.int32)
    depth_N = np.empty(total, np.int32)
    rank_N = np.empty(total, np.int32)
    cell_N = np.empty(total, np.int32)
    acceptance_N = np.empty(total, np.float32)
    first = 0
    for b in range(len(count_B)):
        for n in range(count_B[b]):
            at = first + n
            request_N[at] = b
            parent_N[at] = node_BCI[b, n, PARENT] + first if node_BCI[b, n, PARENT] >= 0 else -1
            token_N[at] = node_BCI[b, n, TOKEN]
            depth_N[at] = node_BCI[b, n, DEPTH]
            rank_N[at] = node_BCI[b, n, RANK]
            cell_N[at] = node_BCI[b, n, CELL]
            acceptance_N[at] = acceptance_BC[b, n]
        first += count_B[b]
    return request_N, parent_N, token_N, depth_N, rank_N, acceptance_N, cell_N
