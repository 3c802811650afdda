"""Attention of a tile of rows, whose keys are read once for all of them: prefill, chains of drafts,
and the shared keys of a tree's rows.

The tile is rows of one request times the query heads of one KV head. An item either covers all keys
of its rows and writes their outputs, or leaves one state per row, which `attention` folds. Keys
from `base` on are found through the last row's path: only items of chains go that far.

Legend: M queries of a tile, T keys of a block, D head width, L equal lanes of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.attention_algebra import (
    BLOCK,
    extend,
    fold,
    nothing,
    paged_kv_slots,
    quotient,
    row_kv_slots,
    starts_split,
)
from tlt_kernels.gpu.attention_keys import load_heads, scales_of
from tlt_kernels.gpu.attention_plan import FIELDS
from tlt_kernels.gpu.quantise import put_heads
from tlt_kernels.gpu.target import pdl_launch, pdl_wait


@triton.jit
def _meet(
    q_MD,
    position_M,
    k_head,
    v_head,
    table,
    own,
    base,
    kv_slot_T,
    start,
    end,
    total_top_M,
    total_ML,
    total_MD,
    top_M,
    sum_ML,
    acc_MD,
    k_scale,
    v_scale,
    scale,
    FIRST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Attend the queries to the blocks of [start, end); the first block is in `kv_slot_T`. Without
    EDGE every row sees every key, and all keys are in pages.
    """
    t_T = tl.arange(0, BLOCK)
    for p in range(start, end, BLOCK):
        if SPLITS and starts_split(p):
            total_top_M, total_ML, total_MD = fold(
                total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD, scale
            )
            top_M, sum_ML, acc_MD = nothing(q_MD.shape[0], D)
        inside_T, visible = None, None
        if EDGE or FIRST > 0:
            p_T = p + t_T
            inside_T = (p_T >= FIRST) & (p_T < end)
            visible = (p_T[None, :] <= position_M[:, None]) & inside_T[None, :]
        top_M, sum_ML, acc_MD = extend(
            q_MD,
            load_heads(k_head, k_scale, kv_slot_T, inside_T, KV_HEADS, D, q_MD.dtype),
            load_heads(v_head, v_scale, kv_slot_T, inside_T, KV_HEADS, D, q_MD.dtype),
            visible,
            top_M,
            sum_ML,
            acc_MD,
            scale,
        )
        if EDGE:
            kv_slot_T = row_kv_slots(table, own, base, p + BLOCK, end, FIRST, PAGE)
        else:
            kv_slot_T = paged_kv_slots(table, p + BLOCK, end, PAGE)
    return total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD


@triton.jit(do_not_specialize=["pages", "depth", "kv_slots"])
def attend_tiles(
    q,
    k_cache,
    v_cache,
    out,
    position,
    path,
    page_table,
    items,
    count,
    state,
    state_top,
    state_sum,
    state_acc,
    scales_GW,
    W,
    k_scales,
    v_scales,
    scale,
    pages,
    depth,
    kv_slots,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Work through the items of tiles. Without SPLITS an item is computed as one split: that takes
    fewer registers and no folds, but bits then depend on the tiling.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m_M, d_D = tl.arange(0, M), tl.arange(0, D)
    work = tl.load(count + 1) * KV_HEADS
    ahead, programs = tl.program_id(0), tl.num_programs(0)
    behind = programs - 1 - ahead
    turns = work // programs
    turns += (tl.where(turns % 2 == 0, ahead, behind) < work % programs).to(tl.int32)
    for turn in range(0, turns):
        # The longest items come last in the list: start with them. Go to and fro, so that the
        # program that had the longest item gets the shortest one next.
        w = work - 1 - turn * programs - tl.where(turn % 2 == 0, ahead, behind)
        head = w % KV_HEADS
        item = items + w // KV_HEADS * FIELDS
        row, batch_slot, size, base = (
            tl.load(item),
            tl.load(item + 1),
            tl.load(item + 2),
            tl.load(item + 3),
        )
        begin, end, states, piece = (
            tl.load(item + 4),
            tl.load(item + 5),
            tl.load(item + 6),
            tl.load(item + 7),
        )
        row_M, member_M = row + m_M // GROUP, m_M // GROUP < size
        query_M = row_M * HEADS + head * GROUP + m_M % GROUP
        position_M = tl.load(position + row_M, member_M, other=-1)
        k_head, v_head, table = (
            k_cache + head * D,
            v_cache + head * D,
            page_table + batch_slot * pages,
        )
        k_scale = scales_of(k_scales, head * kv_slots)
        v_scale = scales_of(v_scales, head * kv_slots)
        kv_slot_T = paged_kv_slots(table, begin, end, PAGE)
        whole = tl.min(tl.where(member_M, position_M, end), axis=0) + 1
        whole = tl.maximum(
            tl.minimum(tl.minimum(whole, base), end) // BLOCK * BLOCK, begin
        )  # every row sees every key below it, in pages
        pdl_wait()
        # Not before: the kernel of single rows reads what the projections wrote before it waits.
        pdl_launch()
        q_MD = tl.load(q + query_M[:, None] * D + d_D[None, :], member_M[:, None], other=0.0)
        total_top_M, total_ML, total_MD = nothing(M, D)
        top_M, sum_ML, acc_MD = nothing(M, D)
        total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD = _meet(
            q_MD,
            position_M,
            k_head,
            v_head,
            table,
            path,
            base,
            kv_slot_T,
            begin,
            whole,
            total_top_M,
            total_ML,
            total_MD,
            top_M,
            sum_ML,
            acc_MD,
            k_scale,
            v_scale,
            scale,
            FIRST,
            KV_HEADS,
            D,
            PAGE,
            SPLITS,
            False,
        )
        if whole < end:
            own, base = (
                path + (tl.load(item) + tl.load(item + 2) - 1) * depth,
                tl.load(item + 3),
            )  # what lives so long takes registers
            kv_slot_T = row_kv_slots(table, own, base, whole, end, FIRST, PAGE)
            total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD = _meet(
                q_MD,
                position_M,
                k_head,
                v_head,
                table,
                own,
                base,
                kv_slot_T,
                whole,
                end,
                total_top_M,
                total_ML,
                total_MD,
                top_M,
                sum_ML,
                acc_MD,
                k_scale,
                v_scale,
                scale,
                FIRST,
                KV_HEADS,
                D,
                PAGE,
                SPLITS,
                True,
            )
        if SPLITS:
            total_top_M, total_ML, total_MD = fold(
                total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD, scale
            )
        else:
            total_top_M, total_ML, total_MD = top_M, sum_ML, acc_MD
        if states == 0:
            out_MD = quotient(total_ML, total_MD)
            if scales_GW is None:
                at_MD = query_M[:, None] * D + d_D[None, :]
                tl.store(out + at_MD, out_MD.to(out.dtype.element_ty), member_M[:, None])
            else:
                put_heads(out_MD, out, scales_GW, W, row, size, head, q, HEADS, GROUP, D)
        else:
            to_M = (
                (tl.load(state + row_M, member_M, other=0) + piece) * HEADS
                + head * GROUP
                + m_M % GROUP
            )
            tl.store(state_top + to_M, total_top_M, member_M)
            tl.store(state_sum + to_M, tl.max(total_ML, axis=1), member_M)
            tl.store(state_acc + to_M[:, None] * D + d_D[None, :], total_MD, member_M[:, None])
    pdl_wait()
    pdl_launch()
