"""Continuations from history as branches of another drafter's trees, on the device.

`graft` finds each request's best matches, in its own text and its siblings', follows their
commonest continuation along the tree, and appends the missing tokens as a chain of nodes. CPU
twins, bit for bit: `cpu.match.plant_trie` at width 1, then `cpu.branches.graft`.

Legend: as in `tensors.py`; W matches kept, D tokens of a continuation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu import growth
from tlt_kernels.gpu.growth import draft_limit
from tlt_kernels.gpu.history import (
    LENGTHS,
    SHARES,
    best_matches,
    continuations,
    length_bucket,
    scan,
    texts_of,
)
from tlt_kernels.gpu.target import PDL, lanes, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Nodes

MATCHES = 8  # occurrences whose continuations are counted


def columns(depth: int, width: int) -> int:
    """Return the columns of a node table with a tree and its branch, which comes last."""
    return growth.columns(depth, width) + depth


@triton.jit(do_not_specialize=["C", "grown", "depth"])
def _graft(
    batch_slot_B,
    token_QT,
    T,
    length_Q,
    limit_Q,
    capacity_Q,
    done_Q,
    drafters_Q,
    max_depth_Q,
    match_BJW,
    parent_BC,
    token_BC,
    depth_BC,
    cell_BC,
    source_BC,
    kv_slot_BC,
    acceptance_BC,
    C,
    acceptance_Z,
    grown,
    first_cell,
    depth,
    floor,
    DRAFTERS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    J: tl.constexpr,
    DP: tl.constexpr,
    CP: tl.constexpr,
    SHARES: tl.constexpr,
    LEFTS: tl.constexpr,
):
    """Graft one request's branch per program. grown: columns of the tree."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    batch_slot = tl.load(batch_slot_B + b)
    length = tl.load(length_Q + batch_slot)
    limit = draft_limit(
        batch_slot, length, depth, limit_Q, capacity_Q, done_Q, drafters_Q, max_depth_Q, DRAFTERS
    )
    key_W, common_W = best_matches(match_BJW, b, W, WP, J)
    token_WD, alive_WD = continuations(key_W, token_QT, T, length_Q, limit, DP)
    w_W = tl.arange(0, WP)
    d_1D = tl.arange(0, DP)[None, :]

    c_C = tl.arange(0, CP)
    acceptance_C = tl.load(acceptance_BC + b * C + c_C, mask=c_C < grown, other=-1.0)
    node_C = acceptance_C >= 0.0
    parent_C = tl.load(parent_BC + b * C + c_C, mask=node_C, other=-2)
    token_C = tl.load(token_BC + b * C + c_C, mask=node_C, other=-1)

    at, above, new, d = -1, 1.0, 0, 0  # the node reached, its acceptance, nodes appended
    together_W = tl.sum((alive_WD & (d_1D == 0)).to(tl.int32), axis=1) > 0
    total = tl.sum(together_W.to(tl.int32))
    while total > 0:
        # the commonest next token, the longest match's of several
        token_W = tl.sum(tl.where(d_1D == d, token_WD, 0), axis=1)
        same_WW = together_W[:, None] & together_W[None, :] & (token_W[:, None] == token_W[None, :])
        count_W = tl.sum(same_WW.to(tl.int32), axis=1)
        best = tl.max(tl.where(together_W, count_W * WP + (WP - 1 - w_W), -1))
        count, lead_W = best // WP, w_W == WP - 1 - best % WP
        token = tl.sum(tl.where(lead_W, token_W, 0))
        trust = length_bucket(tl.sum(tl.where(lead_W, common_W, 0)) + d) * SHARES
        trust += (count * SHARES + total - 1) // total - 1
        # the tree's node, or what its children leave over, added in the CPU twin's order
        child_C = parent_C == at
        found = tl.max(tl.where(child_C & (token_C == token), c_C, -1))
        last = tl.where(found < 0, tl.max(tl.where(child_C, c_C, -1)), -1)
        taken = 0.0
        while last >= 0:
            taken += tl.sum(tl.where(c_C == last, acceptance_C, 0.0))
            child_C = child_C & (c_C != last)
            last = tl.max(tl.where(child_C, c_C, -1))
        rest = tl.maximum(above - taken, 0.0).to(tl.float64)
        share = LEFTS * rest / tl.maximum(above, 1e-9).to(tl.float64)
        cell = trust * LEFTS + tl.minimum(share.to(tl.int32), LEFTS - 1)
        chance = tl.load(acceptance_Z + first_cell + cell)
        acceptance = above * tl.minimum(tl.maximum(chance, 0.0), 1.0)
        grafted = (found < 0) & (acceptance >= floor)
        to = b * C + grown + new
        tl.store(parent_BC + to, at, mask=grafted)
        tl.store(token_BC + to, token, mask=grafted)
        tl.store(depth_BC + to, d + 1, mask=grafted)
        tl.store(cell_BC + to, first_cell + cell, mask=grafted)
        tl.store(source_BC + to, -1, mask=grafted)
        tl.store(kv_slot_BC + to, -1, mask=grafted)
        tl.store(acceptance_BC + to, acceptance, mask=grafted)
        in_tree = tl.sum(tl.where(c_C == found, acceptance_C, 0.0))
        at = tl.where(found >= 0, found, grown + new)
        above = tl.where(found >= 0, in_tree, acceptance)
        new += grafted.to(tl.int32)
        d += 1
        goes_on_W = tl.sum((alive_WD & (d_1D == d)).to(tl.int32), axis=1) > 0
        together_W = together_W & (token_W == token) & goes_on_W
        total = tl.where((found >= 0) | grafted, tl.sum(together_W.to(tl.int32)), 0)


def graft(
    batch_slot_B: Tensor,
    batch_slots: BatchSlots,
    nodes: Nodes,
    calibration: CalibrationTable,
    match_BJW: Tensor,
    *,
    depth: int,
    width: int,
    drafters: int,
    first_cell: int,
    lefts: int,
    floor: float,
) -> None:
    """Append a branch to each request's tree, in the empty columns from `growth.columns(depth,
    width)` on, at least `depth` of them.

    A new node's acceptance probability: its parent's, times the table at first_cell + trust * lefts
    + bucket of the share that the parent's children in the tree leave over. The branch ends where
    it is below `floor`. drafters: bits of `drafters_Q`, all of which a request must permit.
    match_BJW: made by `history.workspace`, of MATCHES matches.
    """
    requests, known = nodes.acceptance_BC.shape
    grown = growth.columns(depth, width)
    assert columns(depth, width) <= known and depth > 0
    assert calibration.prior_Z.shape[0] >= first_cell + LENGTHS * SHARES * lefts
    scan(batch_slot_B, batch_slots, match_BJW, depth=depth, matches=MATCHES, drafters=drafters)
    block = lanes(grown)
    _graft[(requests,)](
        batch_slot_B,
        *texts_of(batch_slots),
        match_BJW,
        *nodes,
        known,
        calibration.acceptance_Z,
        grown,
        first_cell,
        depth,
        floor,
        DRAFTERS=drafters,
        W=MATCHES,
        WP=match_BJW.shape[2],
        J=match_BJW.shape[1],
        DP=lanes(depth, 8),
        CP=block,
        SHARES=SHARES,
        LEFTS=lefts,
        num_warps=1 if block <= 256 else 4,
        **PDL,
    )
