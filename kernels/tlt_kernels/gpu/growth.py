"""Growth of draft trees on the device: the roots of a draft graph, then one `grow` between two
forwards of the drafter.

Every level's rows, nodes and KV slots have fixed indices in their tables, so a graph can contain
the whole proposal: level 0 adds W nodes per request (columns 0 .. W - 1), each later level W * W.
Expansion is best-first: per request, the W most probable unexpanded nodes of any depth. At width 1
the tree is a chain.

Legend: as in `tensors.py`; W width, M rows of a level, L children given per row (at least 2: the
gap of the best child needs the second).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, lanes, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots, CalibrationTable, Draft, Nodes

FLOOR = 0.02  # a less probable node is not expanded: its row costs more than it saves
# The calibration table has two phases x RANKS x BUCKETS cells.
RANKS, BUCKETS = tl.constexpr(8), tl.constexpr(16)


def columns(depth: int, width: int) -> int:
    """Return the number of nodes per request in a graph."""
    return width + (depth - 1) * width * width if depth else 0


@triton.jit
def draft_limit(
    batch_slot, length, depth, limit_Q, capacity_Q, done_Q, drafters_Q, max_depth_Q, DRAFTERS
):
    """Return the depth of the deepest useful draft token of a batch slot: a bonus token must follow
    it, and pages must have room for its KV. 0 = none, also if one of the DRAFTERS (bits) may not
    draft.
    """
    room = tl.minimum(
        tl.load(limit_Q + batch_slot) - length - 1, tl.load(capacity_Q + batch_slot) - length
    )
    permitted = (tl.load(drafters_Q + batch_slot) & DRAFTERS) == DRAFTERS
    able = (
        (tl.load(done_Q + batch_slot) == 0) & permitted & (length >= 2)
    )  # no feature precedes the first token
    most = tl.minimum(depth, tl.load(max_depth_Q + batch_slot))
    return tl.where(able, tl.maximum(tl.minimum(room, most), 0), 0)


@triton.jit(do_not_specialize=["D", "C", "depth"])
def _roots(
    batch_slot_B,
    token_QT,
    T,
    length_Q,
    limit_Q,
    capacity_Q,
    page_table_QP,
    P,
    done_Q,
    drafters_Q,
    max_depth_Q,
    token_X,
    position_X,
    kv_slot_X,
    batch_slot_X,
    base_X,
    path_XD,
    D,
    source_X,
    node_X,
    acceptance_X,
    root_position_B,
    limit_B,
    acceptance_BC,
    C,
    depth,
    trash,
    idle,
    PAGE: tl.constexpr,
    DRAFTERS: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    batch_slot = tl.load(batch_slot_B + b)
    length = tl.load(length_Q + batch_slot)
    position = tl.maximum(length - 1, 0)
    limit = draft_limit(
        batch_slot, length, depth, limit_Q, capacity_Q, done_Q, drafters_Q, max_depth_Q, DRAFTERS
    )
    alive = limit > 0
    token = tl.load(token_QT + batch_slot.to(tl.int64) * T + position, mask=alive, other=0)
    page = tl.load(page_table_QP + batch_slot * P + position // PAGE, mask=alive, other=0)
    tl.store(token_X + b, token)
    tl.store(position_X + b, tl.where(alive, position, -1))
    tl.store(kv_slot_X + b, tl.where(alive, page * PAGE + position % PAGE, trash))
    tl.store(batch_slot_X + b, tl.where(alive, batch_slot, idle))
    tl.store(base_X + b, tl.where(alive, length, 0))
    d_D = tl.arange(0, DP)
    tl.store(path_XD + b * D + d_D, -1, mask=d_D < D)
    tl.store(source_X + b, batch_slot)
    tl.store(node_X + b, -1)
    tl.store(acceptance_X + b, tl.where(alive, 1.0, -1.0))
    tl.store(root_position_B + b, position)
    tl.store(limit_B + b, limit)
    for first in range(0, C, BLOCK):
        c_C = first + tl.arange(0, BLOCK)
        tl.store(acceptance_BC + b * C + c_C, -1.0, mask=c_C < C)


def roots(
    batch_slot_B: Tensor,
    batch_slots: BatchSlots,
    draft: Draft,
    nodes: Nodes,
    *,
    depth: int,
    trash: int,
    drafter: int = 0,
) -> None:
    """Lay out level 0: each request's last known token, and its depth limit. Empty the node table.

    A request is dead here if it is done, if this drafter (by its bit of `drafters_Q`) may not draft
    for it, or if it has no room for a draft token and a bonus token.
    """
    rows, path_depth = draft.rows, draft.rows.path_RD.shape[1]
    _roots[(batch_slot_B.shape[0],)](
        batch_slot_B,
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.limit_Q,
        batch_slots.capacity_Q,
        batch_slots.page_table_QP,
        batch_slots.page_table_QP.shape[1],
        batch_slots.done_Q,
        batch_slots.drafters_Q,
        batch_slots.max_depth_Q,
        rows.token_R,
        rows.position_R,
        rows.kv_slot_R,
        rows.batch_slot_R,
        rows.base_R,
        rows.path_RD,
        path_depth,
        draft.source_X,
        draft.node_X,
        draft.acceptance_X,
        draft.root_position_B,
        draft.limit_B,
        nodes.acceptance_BC,
        nodes.acceptance_BC.shape[1],
        depth,
        trash,
        batch_slots.idle,
        PAGE=PAGE_SIZE,
        DRAFTERS=1 << drafter,
        DP=lanes(path_depth, 8),
        BLOCK=128,
        num_warps=1,
        **PDL,
    )


@triton.jit(
    do_not_specialize=[
        "D",
        "C",
        "level_rows",
        "first_row",
        "first_column",
        "next_row",
        "last",
        "first_kv_slot",
    ]
)
def _grow(
    token_ML,
    z_ML,
    L: tl.constexpr,
    token_X,
    position_X,
    kv_slot_X,
    batch_slot_X,
    base_X,
    path_XD,
    D,
    source_X,
    node_X,
    acceptance_X,
    root_position_B,
    limit_B,
    parent_BC,
    token_BC,
    depth_BC,
    cell_BC,
    source_BC,
    kv_slot_BC,
    acceptance_BC,
    C,
    acceptance_Z,
    gap_edge_G,
    level_rows,
    first_row,
    first_column,
    next_row,
    last,
    first_kv_slot,
    trash,
    idle,
    floor,
    W: tl.constexpr,
    WP: tl.constexpr,
    CP: tl.constexpr,
    DP: tl.constexpr,
    RANKS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Grow one request per program. level_rows: the request's rows on this level, 1 or W."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    root_position = tl.load(root_position_B + b)
    limit = tl.load(limit_B + b)

    # plant the children of the rows just run
    j_W1 = tl.arange(0, WP)[:, None]
    rank_1W = tl.arange(0, WP)[None, :]
    row_W1 = first_row + b * level_rows + j_W1
    run_W1 = j_W1 < level_rows
    node_W1 = tl.load(node_X + row_W1, mask=run_W1, other=-1)
    depth_W1 = tl.load(position_X + row_W1, mask=run_W1, other=-1) - root_position + 1
    above_W1 = tl.load(acceptance_X + row_W1, mask=run_W1, other=-1.0)
    child_W1 = (b * level_rows + j_W1) * L
    planted_WW = run_W1 & (rank_1W < W)
    token_WW = tl.load(token_ML + child_W1 + rank_1W, mask=planted_WW, other=-1)
    best_W1 = tl.load(z_ML + child_W1, mask=run_W1, other=0.0)
    second_W1 = tl.load(z_ML + child_W1 + 1, mask=run_W1, other=0.0)
    z_WW = tl.load(z_ML + child_W1 + rank_1W, mask=planted_WW, other=0.0)
    other_WW = tl.maximum(
        tl.where(rank_1W == 0, second_W1, z_WW), -1e30
    )  # missing children have -inf
    gap_WW = tl.maximum(best_W1, -1e30) - other_WW
    bucket_WW = tl.zeros([WP, WP], tl.int32)
    for g in tl.static_range(BUCKETS - 1):
        bucket_WW += (gap_WW > tl.load(gap_edge_G + g)).to(tl.int32)
    cell_WW = (
        tl.where(node_W1 < 0, 0, RANKS) + tl.minimum(rank_1W, RANKS - 1)
    ) * BUCKETS + bucket_WW
    alive_WW = planted_WW & (token_WW >= 0) & (above_W1 > 0.0) & (depth_W1 <= limit)
    chance_WW = tl.load(acceptance_Z + cell_WW, mask=alive_WW, other=0.0)
    acceptance_WW = tl.where(alive_WW, above_W1 * tl.minimum(tl.maximum(chance_WW, 0.0), 1.0), -1.0)
    at_WW = b * C + first_column + j_W1 * W + rank_1W
    whole_WW = tl.zeros([WP, WP], tl.int32)
    tl.store(parent_BC + at_WW, whole_WW + node_W1, mask=planted_WW)
    tl.store(token_BC + at_WW, token_WW, mask=planted_WW)
    tl.store(depth_BC + at_WW, whole_WW + depth_W1, mask=planted_WW)
    tl.store(cell_BC + at_WW, cell_WW, mask=planted_WW)
    tl.store(source_BC + at_WW, whole_WW + row_W1, mask=planted_WW)
    tl.store(kv_slot_BC + at_WW, whole_WW - 1, mask=planted_WW)
    tl.store(acceptance_BC + at_WW, acceptance_WW, mask=planted_WW)
    if last:
        return
    tl.debug_barrier()  # below, threads read nodes that others have just written

    # pick the next rows
    c_C = tl.arange(0, CP)
    known_C = c_C < first_column + level_rows * W
    acceptance_C = tl.load(acceptance_BC + b * C + c_C, mask=known_C, other=-1.0)
    expandable_C = (acceptance_C > floor) & (
        tl.load(kv_slot_BC + b * C + c_C, mask=known_C, other=0) < 0
    )
    expandable_C &= tl.load(depth_BC + b * C + c_C, mask=known_C, other=0) < limit
    bits_C = acceptance_C.to(tl.int32, bitcast=True).to(
        tl.int64
    )  # positive floats order like their bits
    key_C = tl.where(expandable_C, bits_C * CP + (CP - 1 - c_C), -1)
    w_W = tl.arange(0, WP)
    node_W = tl.full([WP], -1, tl.int32)
    for w in range(W):
        best = tl.max(key_C, axis=0)
        node_W = tl.where((w_W == w) & (best >= 0), CP - 1 - (best & (CP - 1)).to(tl.int32), node_W)
        key_C = tl.where(key_C == best, -1, key_C)
    alive_W = node_W >= 0
    at_W = b * C + node_W
    token_W = tl.load(token_BC + at_W, mask=alive_W, other=0)
    depth_W = tl.load(depth_BC + at_W, mask=alive_W, other=0)
    source_W = tl.load(source_BC + at_W, mask=alive_W, other=0)
    next_acceptance_W = tl.load(acceptance_BC + at_W, mask=alive_W, other=-1.0)
    batch_slot = tl.load(batch_slot_X + b)
    x_W = next_row + b * W + w_W
    laid_W = w_W < W
    kv_slot_W = tl.where(alive_W, first_kv_slot + x_W - tl.num_programs(0), trash)
    tl.store(kv_slot_BC + at_W, kv_slot_W, mask=alive_W)
    tl.store(token_X + x_W, token_W, mask=laid_W)
    tl.store(position_X + x_W, tl.where(alive_W, root_position + depth_W, -1), mask=laid_W)
    tl.store(kv_slot_X + x_W, kv_slot_W, mask=laid_W)
    tl.store(batch_slot_X + x_W, tl.where(alive_W, batch_slot, idle), mask=laid_W)
    tl.store(base_X + x_W, tl.where(alive_W, root_position + 1, 0), mask=laid_W)
    tl.store(source_X + x_W, source_W, mask=laid_W)
    tl.store(node_X + x_W, node_W, mask=laid_W)
    tl.store(acceptance_X + x_W, next_acceptance_W, mask=laid_W)
    d_1D = tl.arange(0, DP)[None, :]
    path_WD = tl.load(
        path_XD + source_W[:, None] * D + d_1D, mask=alive_W[:, None] & (d_1D < D), other=-1
    )
    path_WD = tl.where(
        alive_W[:, None] & (d_1D == depth_W[:, None] - 1), kv_slot_W[:, None], path_WD
    )
    tl.store(path_XD + x_W[:, None] * D + d_1D, path_WD, mask=laid_W[:, None] & (d_1D < D))


def grow(
    level: int,
    token_ML: Tensor,
    z_ML: Tensor,
    draft: Draft,
    nodes: Nodes,
    calibration: CalibrationTable,
    gap_edge_G: Tensor,
    *,
    requests: int,
    depth: int,
    width: int,
    first_kv_slot: int,
    trash: int,
    idle: int,
    floor: float = FLOOR,
) -> None:
    """Add the children of level `level`, whose rows have just run, and lay out level `level + 1`,
    unless `level` is the last one.

    token_ML: int32 target ids, best first (-1 = none). z_ML: float32, their perturbed logits. Draft
    row x > level 0 has the KV slot first_kv_slot + x - requests of the drafter's cache. acceptance
    = the parent's times the table at (phase, rank, bucket of the gap).
    """
    given, known, path_depth = (
        token_ML.shape[1],
        nodes.acceptance_BC.shape[1],
        draft.rows.path_RD.shape[1],
    )
    assert (
        given >= max(width, 2)
        and columns(depth, width) <= known
        and max(depth - 1, 1) <= path_depth
        and z_ML.shape == token_ML.shape
    )
    assert gap_edge_G.shape[0] == BUCKETS.value - 1
    rows, block = draft.rows, lanes(columns(depth, width))
    first_row, level_rows = Draft.level(requests, width, level)
    _grow[(requests,)](
        token_ML,
        z_ML,
        given,
        rows.token_R,
        rows.position_R,
        rows.kv_slot_R,
        rows.batch_slot_R,
        rows.base_R,
        rows.path_RD,
        path_depth,
        draft.source_X,
        draft.node_X,
        draft.acceptance_X,
        draft.root_position_B,
        draft.limit_B,
        *nodes,
        known,
        calibration.acceptance_Z,
        gap_edge_G,
        level_rows // requests,
        first_row,
        columns(level, width),
        first_row + level_rows,
        int(level == depth - 1),
        first_kv_slot,
        trash,
        idle,
        floor,
        W=width,
        WP=triton.next_power_of_2(width),
        CP=block,
        DP=lanes(path_depth, 8),
        RANKS=RANKS,
        BUCKETS=BUCKETS,
        num_warps=1 if block <= 256 else 4,
        **PDL,
    )
