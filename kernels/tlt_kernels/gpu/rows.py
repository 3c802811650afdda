"""The rows of an extend: the draft nodes to verify, and the positions of prefill chunks.

Rows 0 .. V - 1 are roots and draft nodes, request after request, parents first; rows V .. V + P - 1
are prefill chunks. A node's acceptance probability never exceeds its parent's, so the best nodes of
the batch form whole trees.

Legend: as in `tensors.py`; P prefill rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.priority import priority
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import (
    PAGE_SIZE,
    BatchSlots,
    KeptRows,
    Nodes,
    PrefillChunks,
    RowTable,
    Trees,
)

MAX_NODES = 1 << 16  # nodes of a batch: 16 bits of a key name the node


# Steps come in too many sizes to compile a kernel for each.
@triton.jit(
    do_not_specialize=["B", "T", "P", "C", "own_columns", "V", "scratch_start", "trash", "idle"]
)
def _select_rows(
    batch_slot_B,
    B,
    token_QT,
    T,
    length_Q,
    page_table_QP,
    P,
    done_Q,
    parent_BC,
    token_BC,
    depth_BC,
    acceptance_BC,
    C,
    own_columns,
    token_R,
    position_R,
    kv_slot_R,
    batch_slot_R,
    base_R,
    path_RD,
    D: tl.constexpr,
    parent_R,
    root_E,
    count_E,
    node_V,
    own_V,
    sample_row_S,
    page_R,
    V,
    scratch_start,
    trash,
    idle,
    PAGE: tl.constexpr,
    DRAFTS: tl.constexpr,
    BP: tl.constexpr,
    NP: tl.constexpr,
    CP: tl.constexpr,
    VP: tl.constexpr,
    DP: tl.constexpr,
):
    """Lay out one request per program. Each program finds the cut of the batch by itself."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    b_B = tl.arange(0, BP)
    batch_slot_B_ = tl.load(batch_slot_B + b_B, mask=b_B < B, other=idle)
    live_B = (tl.load(done_Q + batch_slot_B_) == 0).to(tl.int32)
    rows = tl.sum(live_B)
    first = tl.sum(tl.where(b_B < b, live_B, 0))
    live = tl.sum(tl.where(b_B == b, live_B, 0)) > 0
    batch_slot = tl.load(batch_slot_B + b)
    length = tl.load(length_Q + batch_slot)
    position = tl.maximum(length - 1, 0)
    token = tl.load(token_QT + batch_slot.to(tl.int64) * T + position)
    page = tl.load(page_table_QP + batch_slot * P + position // PAGE)
    d_D = tl.arange(0, DP)

    count = 0
    if DRAFTS:
        n_N = tl.arange(0, NP)
        request_N = n_N // C
        key_N = priority(
            tl.load(acceptance_BC + n_N, mask=n_N < B * C, other=-1.0), (n_N % C) * B + request_N
        )
        budget = V - rows
        low, high = 0, 0x7FFFFFFF
        low = tl.where(tl.sum((key_N >= 0).to(tl.int32)) <= budget, high, low)
        cut = tl.where(low == high, 0, high)
        while high - low > 1:  # the least key that leaves no more than the budget
            middle = low + (high - low) // 2
            above = tl.sum((key_N >= middle).to(tl.int32))
            low = tl.where(above >= budget, middle, low)
            high = tl.where(above <= budget, middle, high)
            cut = high
        chosen_N = key_N >= cut
        first += tl.sum((chosen_N & (request_N < b)).to(tl.int32))
        rows += tl.sum(chosen_N.to(tl.int32))

        c_C = tl.arange(0, CP)
        at_C = b * C + c_C
        column_C = c_C < C
        chosen_C = (
            priority(tl.load(acceptance_BC + at_C, mask=column_C, other=-1.0), c_C * B + b) >= cut
        )
        parent_C = tl.load(parent_BC + at_C, mask=column_C, other=-1)
        token_C = tl.load(token_BC + at_C, mask=chosen_C, other=0)
        depth_C = tl.load(depth_BC + at_C, mask=chosen_C, other=0)
        count = tl.sum(chosen_C.to(tl.int32))
        row_C = first + tl.cumsum(chosen_C.to(tl.int32), axis=0)
        parent_row_C = tl.where(parent_C < 0, first, tl.gather(row_C, tl.maximum(parent_C, 0), 0))
        tl.store(token_R + row_C, token_C, mask=chosen_C)
        tl.store(position_R + row_C, position + depth_C, mask=chosen_C)
        tl.store(kv_slot_R + row_C, scratch_start + row_C, mask=chosen_C)
        tl.store(batch_slot_R + row_C, batch_slot, mask=chosen_C)
        tl.store(base_R + row_C, length, mask=chosen_C)
        tl.store(parent_R + row_C, parent_row_C, mask=chosen_C)
        tl.store(node_V + row_C, at_C, mask=chosen_C)
        tl.store(own_V + row_C, (c_C < own_columns).to(tl.int32), mask=chosen_C)
        above_C = c_C
        for d in range(D):  # column d above the row itself; columns from the depth on are empty
            column = depth_C - 1 - d
            kv_slot_C = scratch_start + tl.gather(row_C, above_C, 0)
            tl.store(path_RD + row_C * D + column, kv_slot_C, mask=chosen_C & (column >= 0))
            tl.store(path_RD + row_C * D + d, -1, mask=chosen_C & (d >= depth_C))
            above_C = tl.maximum(tl.gather(parent_C, above_C, 0), 0)

    if live:
        tl.store(token_R + first, token)
        tl.store(position_R + first, position)
        tl.store(kv_slot_R + first, page * PAGE + position % PAGE)
        tl.store(batch_slot_R + first, batch_slot)
        tl.store(base_R + first, length)
        tl.store(parent_R + first, -1)
        tl.store(node_V + first, -1)
        tl.store(path_RD + first * D + d_D, -1, mask=d_D < D)
    tl.store(root_E + b, tl.where(live, first, -1))
    tl.store(count_E + b, tl.where(live, 1 + count, 0))

    v_V = tl.arange(0, VP)
    mine_V = (v_V < V) & (v_V % B == b)
    tl.store(sample_row_S + v_V, tl.where(v_V < rows, v_V, -1), mask=mine_V)
    tl.store(page_R + v_V, -1, mask=mine_V)
    dead_V = mine_V & (v_V >= rows)
    tl.store(token_R + v_V, 0, mask=dead_V)
    tl.store(position_R + v_V, -1, mask=dead_V)
    tl.store(kv_slot_R + v_V, trash, mask=dead_V)
    tl.store(batch_slot_R + v_V, idle, mask=dead_V)
    tl.store(base_R + v_V, 0, mask=dead_V)
    tl.store(parent_R + v_V, -1, mask=dead_V)
    tl.store(node_V + v_V, -1, mask=dead_V)
    tl.store(
        path_RD + v_V[:, None] * D + d_D[None, :], -1, mask=dead_V[:, None] & (d_D[None, :] < D)
    )


def padded(count: int, *sizes: int) -> int:
    """Return the first of the sizes that is at least the count, else the next power of two: each
    size is another compiled kernel, so there are few.
    """
    return next((size for size in sizes if count <= size), triton.next_power_of_2(count))


def _warps(block: int) -> int:
    sizes = {64: 1, 256: 2, 4096: 4, 16384: 8}
    return next((warps for size, warps in sizes.items() if block <= size), 16)


def select_rows(
    batch_slot_B: Tensor,
    batch_slots: BatchSlots,
    nodes: Nodes | None,
    rows: RowTable,
    trees: Trees,
    kept: KeptRows,
    *,
    decode_rows: int,
    scratch_start: int,
    trash: int,
    own_columns: int | None = None,
) -> None:
    """Lay out rows 0 .. V - 1: a root per live request, and the V - live nodes of the batch with
    the highest acceptance probability.

    Ties (11 bits of the probability count) go to the lower column, then to the earlier request.
    Draft row v writes its KV to scratch_start + v. Without nodes, or if all columns are empty, this
    is plain decoding. Fills `trees` for entries < B and samples < V, and empties `kept.page_R` for
    rows < V. Branches begin at column `own_columns`; None: there are none.
    """
    requests, path_depth = batch_slot_B.shape[0], rows.path_RD.shape[1]
    columns = nodes.acceptance_BC.shape[1] if nodes else 1
    assert requests <= decode_rows and requests * columns <= MAX_NODES
    if not decode_rows:
        return
    parent_BC, token_BC, depth_BC, acceptance_BC = (
        (nodes.parent_BC, nodes.token_BC, nodes.depth_BC, nodes.acceptance_BC)
        if nodes
        else (rows.token_R,) * 4
    )
    block = padded(requests * columns, 256, 2048, 4096, 16384) if nodes else 2
    _select_rows[(requests,)](
        batch_slot_B,
        requests,
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.page_table_QP,
        batch_slots.page_table_QP.shape[1],
        batch_slots.done_Q,
        parent_BC,
        token_BC,
        depth_BC,
        acceptance_BC,
        columns,
        columns if own_columns is None else own_columns,
        rows.token_R,
        rows.position_R,
        rows.kv_slot_R,
        rows.batch_slot_R,
        rows.base_R,
        rows.path_RD,
        path_depth,
        rows.parent_R,
        trees.root_E,
        trees.count_E,
        trees.node_V,
        trees.own_V,
        trees.sample_row_S,
        kept.page_R,
        decode_rows,
        scratch_start,
        trash,
        batch_slots.idle,
        PAGE=PAGE_SIZE,
        DRAFTS=nodes is not None,
        BP=padded(requests, 32, 512),
        NP=block,
        CP=padded(columns, 32, 256) if nodes else 2,
        VP=padded(decode_rows, 64, 512),
        DP=triton.next_power_of_2(path_depth),
        num_warps=_warps(block),
        **PDL,
    )


@triton.jit(do_not_specialize=["W", "B", "V", "prefill_rows"])
def _layout_prefill(
    batch_slot_W,
    start_W,
    count_W,
    W,
    token_QT,
    T,
    length_Q,
    page_table_QP,
    P,
    token_R,
    position_R,
    kv_slot_R,
    batch_slot_R,
    base_R,
    path_RD,
    D: tl.constexpr,
    parent_R,
    root_E,
    count_E,
    sample_row_S,
    page_R,
    B,
    V,
    prefill_rows,
    trash,
    idle,
    PAGE: tl.constexpr,
    WP: tl.constexpr,
    BLOCK: tl.constexpr,
    DP: tl.constexpr,
):
    """Lay out one block of rows per program. The first program also describes the chunks."""
    pdl_launch()
    pdl_wait()
    i_P = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w_W = tl.arange(0, WP)
    rows_W = tl.load(count_W + w_W, mask=w_W < W, other=0)
    end_W = tl.cumsum(rows_W, axis=0)
    if tl.program_id(0) == 0:
        chunk_W = w_W < W
        first_position_W = tl.load(start_W + w_W, mask=chunk_W, other=0)
        known_W = tl.load(length_Q + tl.load(batch_slot_W + w_W, mask=chunk_W, other=idle))
        row_W = V + end_W - 1
        samples_W = (rows_W > 0) & (first_position_W + rows_W == known_W)
        tl.store(root_E + B + w_W, tl.where(rows_W > 0, row_W, -1), mask=chunk_W)
        tl.store(count_E + B + w_W, samples_W.to(tl.int32), mask=chunk_W)
        tl.store(sample_row_S + V + w_W, tl.where(samples_W, row_W, -1), mask=chunk_W)
    chunk_P = tl.sum((end_W[None, :] <= i_P[:, None]).to(tl.int32), axis=1)
    before_P = tl.sum(tl.where(w_W[None, :] < chunk_P[:, None], rows_W[None, :], 0), axis=1)
    alive_P = (i_P < prefill_rows) & (chunk_P < W)
    start_P = tl.load(start_W + chunk_P, mask=alive_P, other=0)
    batch_slot_P = tl.load(batch_slot_W + chunk_P, mask=alive_P, other=idle)
    position_P = start_P + i_P - before_P
    token_P = tl.load(token_QT + batch_slot_P.to(tl.int64) * T + position_P, mask=alive_P, other=0)
    page_P = tl.load(page_table_QP + batch_slot_P * P + position_P // PAGE, mask=alive_P, other=0)
    row_P = V + i_P
    stored_P = i_P < prefill_rows
    tl.store(token_R + row_P, token_P, mask=stored_P)
    tl.store(position_R + row_P, tl.where(alive_P, position_P, -1), mask=stored_P)
    tl.store(
        kv_slot_R + row_P,
        tl.where(alive_P, page_P * PAGE + position_P % PAGE, trash),
        mask=stored_P,
    )
    tl.store(batch_slot_R + row_P, batch_slot_P, mask=stored_P)
    base_P = start_P + tl.load(count_W + chunk_P, mask=alive_P, other=0)
    tl.store(base_R + row_P, base_P, mask=stored_P)
    tl.store(parent_R + row_P, tl.where(alive_P & (i_P > before_P), row_P - 1, -1), mask=stored_P)
    tl.store(
        page_R + row_P,
        tl.where(alive_P & (position_P % PAGE == PAGE - 1), page_P, -1),
        mask=stored_P,
    )
    d_1D = tl.arange(0, DP)[None, :]
    tl.store(path_RD + row_P[:, None] * D + d_1D, -1, mask=stored_P[:, None] & (d_1D < D))


def layout_prefill(
    chunks: PrefillChunks,
    batch_slots: BatchSlots,
    rows: RowTable,
    trees: Trees,
    kept: KeptRows,
    *,
    requests: int,
    decode_rows: int,
    prefill_rows: int,
    trash: int,
) -> None:
    """Lay out rows V .. V + P - 1: positions [start, start + count) of each chunk in turn.

    A chunk samples if it reaches the end of its sequence. Fills `trees` for entries B + w (root_E:
    the chunk's last row, whether or not it samples; count_E: 1 if it samples) and samples V + w,
    and `kept.page_R` from row V on.
    """
    count, path_depth = chunks.count_W.shape[0], rows.path_RD.shape[1]
    block = 64 if prefill_rows <= 64 else 128  # two compiled kernels serve steps of every size
    _layout_prefill[(triton.cdiv(prefill_rows, block),)](
        *chunks,
        count,
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.page_table_QP,
        batch_slots.page_table_QP.shape[1],
        rows.token_R,
        rows.position_R,
        rows.kv_slot_R,
        rows.batch_slot_R,
        rows.base_R,
        rows.path_RD,
        path_depth,
        rows.parent_R,
        trees.root_E,
        trees.count_E,
        trees.sample_row_S,
        kept.page_R,
        requests,
        decode_rows,
        prefill_rows,
        trash,
        batch_slots.idle,
        PAGE=PAGE_SIZE,
        WP=max(triton.next_power_of_2(count), 2),
        BLOCK=block,
        DP=triton.next_power_of_2(path_depth),
        num_warps=4,
        **PDL,
    )
