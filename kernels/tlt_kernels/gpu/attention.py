"""Paged attention of decode, tree and prefill rows: a row has the same bits for any batch, tree and
chunking.

A step calls `fill_plan` once, and then `attend` in each layer. This file has the kernel of single
rows: one row's query heads of one KV head read the keys in the row's KV slots, so a draft ancestor
is read at the index that it will have once committed. The kernel also folds the states that tiles
left for the row; if several programs share a row, the last of them folds all their states.

The kernel right before `attend` must let its dependents start only after its own `pdl_wait`, as
`rope_store` does, because `attend` reads items and page tables before it waits. So does the kernel
of tiles: the kernel of single rows reads everything but the tiles' states before it waits for them.

Legend: R rows, N query heads, K KV heads, D head width, S KV slots, M queries of a program (the
group, padded to 16), T keys of a block.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.attention_algebra import (
    BLOCK,
    LOWEST,
    extend,
    fold,
    nothing,
    quotient,
    row_kv_slots,
    starts_split,
)
from tlt_kernels.gpu.attention_keys import load_heads, scales_of, stored
from tlt_kernels.gpu.attention_plan import FIELDS, AttentionPlan, PagedRows, allocate, tile_of
from tlt_kernels.gpu.attention_planner import fill_plan
from tlt_kernels.gpu.attention_tiles import attend_tiles
from tlt_kernels.gpu.quantise import BLOCK as FP8_BLOCK
from tlt_kernels.gpu.quantise import Quantised, empty_rows, places, put_heads
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import PAGE_SIZE

__all__ = [
    "AttentionPlan",
    "PagedRows",
    "allocate",
    "attend",
    "attend_into",
    "fill_plan",
    "tile_of",
]

_M = 16
_WARPS = 4
_REGISTERS = 1 << 16  # per multiprocessor
# A copy issued at the end of a block arrives during the next one: two stages make every block wait.
_TILE_STAGES = 3
_TILE_BYTES = 224 << 10  # shared memory for a program's queries and keys; above it, two stages
_AT_ONCE = 4  # states in flight


@triton.jit
def _fold_states(
    state_top,
    state_sum,
    state_acc,
    first,
    states,
    head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Fold states [first, first + states) of a row, in order. They are read past the first-level
    cache, because other programs wrote them.
    """
    m_M, d_D = tl.arange(0, M), tl.arange(0, D)
    top_M, _, acc_MD = nothing(M, D)
    sum_M1 = tl.zeros([M, 1], tl.float32)
    for i in range(0, states, AT_ONCE):
        for j in tl.static_range(AT_ONCE):  # unrolled, so that the loads are in flight together
            mask_M = (m_M < GROUP) & (i + j < states)
            at_M = (first + i + j) * HEADS + head * GROUP + m_M
            next_top_M = tl.load(state_top + at_M, mask_M, other=LOWEST, cache_modifier=".cg")
            next_sum_M = tl.load(state_sum + at_M, mask_M, other=0.0, cache_modifier=".cg")
            next_acc_MD = tl.load(
                state_acc + at_M[:, None] * D + d_D[None, :],
                mask_M[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            top_M, sum_M1, acc_MD = fold(
                top_M, sum_M1, acc_MD, next_top_M, next_sum_M[:, None], next_acc_MD, scale
            )
    return sum_M1, acc_MD


@triton.jit(do_not_specialize=["pages", "depth", "kv_slots"])
def _attend_rows(
    q,
    k_cache,
    v_cache,
    out,
    path,
    page_table,
    items,
    count,
    counter,
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
    M_FOLD: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    APART: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m_M, t_T, d_D = tl.arange(0, M), tl.arange(0, BLOCK), tl.arange(0, D)
    pdl_launch()
    work = tl.load(count) * KV_HEADS
    program, programs = tl.program_id(0), tl.num_programs(0)
    ahead = program % APART * (programs // APART) + program // APART
    rounds = (
        work // programs
    )  # rounds in which every program has an item; the first programs get the rest
    for turn in range(rounds + (program < work % programs).to(tl.int32)):
        w = turn * programs + tl.where(turn < rounds, ahead, program)
        head = w % KV_HEADS
        item = items + w // KV_HEADS * FIELDS
        row, batch_slot, base, begin, end = (
            tl.load(item),
            tl.load(item + 1),
            tl.load(item + 2),
            tl.load(item + 3),
            tl.load(item + 4),
        )
        piece, arrivals, states, first_state = (
            tl.load(item + 5),
            tl.load(item + 6),
            tl.load(item + 7),
            tl.load(item + 8),
        )
        k_head, v_head, table, own = (
            k_cache + head * D,
            v_cache + head * D,
            page_table + batch_slot * pages,
            path + row * depth,
        )
        k_scale = scales_of(k_scales, head * kv_slots)
        v_scale = scales_of(v_scales, head * kv_slots)
        kv_slot_T = row_kv_slots(table, own, base, begin, end, FIRST, PAGE)
        if not TILES:
            pdl_wait()
        at_MD = (row * HEADS + head * GROUP + m_M)[:, None] * D + d_D[None, :]
        q_MD = tl.load(q + at_MD, (m_M < GROUP)[:, None], other=0.0)
        total_top_M, total_ML, total_MD = nothing(M, D)
        top_M, sum_ML, acc_MD = nothing(M, D)
        for start in range(begin, end, BLOCK):
            if starts_split(start):
                total_top_M, total_ML, total_MD = fold(
                    total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD, scale
                )
                top_M, sum_ML, acc_MD = nothing(M, D)
            p_T = start + t_T
            visible_T = (p_T >= FIRST) & (p_T < end)
            k_TD = load_heads(k_head, k_scale, kv_slot_T, visible_T, KV_HEADS, D, q_MD.dtype)
            v_TD = load_heads(v_head, v_scale, kv_slot_T, visible_T, KV_HEADS, D, q_MD.dtype)
            kv_slot_T = row_kv_slots(table, own, base, start + BLOCK, end, FIRST, PAGE)
            top_M, sum_ML, acc_MD = extend(
                q_MD, k_TD, v_TD, visible_T[None, :], top_M, sum_ML, acc_MD, scale
            )
        total_top_M, total_ML, total_MD = fold(
            total_top_M, total_ML, total_MD, top_M, sum_ML, acc_MD, scale
        )
        if states == 0:
            out_MD = quotient(total_ML, total_MD)
            if scales_GW is None:
                tl.store(out + at_MD, out_MD.to(out.dtype.element_ty), (m_M < GROUP)[:, None])
            else:
                put_heads(out_MD, out, scales_GW, W, row, 1, head, q, HEADS, GROUP, D)
        else:
            to_M = (first_state + piece) * HEADS + head * GROUP + m_M
            own_M = (m_M < GROUP) & (piece >= 0)
            tl.store(state_top + to_M, total_top_M, own_M)
            tl.store(state_sum + to_M, tl.max(total_ML, axis=1), own_M)
            tl.store(state_acc + to_M[:, None] * D + d_D[None, :], total_MD, own_M[:, None])
            tl.debug_barrier()
            arrived = 1
            if arrivals > 1:
                arrived = (
                    tl.atomic_add(counter + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
                    + 1
                )
            if arrived >= arrivals:
                if arrivals > 1:
                    tl.store(counter + row * KV_HEADS + head, 0)
                if TILES:
                    pdl_wait()  # for the states that tiles left
                all_M1, all_MD = _fold_states(
                    state_top,
                    state_sum,
                    state_acc,
                    first_state,
                    states,
                    head,
                    scale,
                    HEADS,
                    GROUP,
                    D,
                    M_FOLD,
                    AT_ONCE,
                )
                out_FD = quotient(all_M1, all_MD)
                if scales_GW is None:
                    m_F = tl.arange(0, M_FOLD)
                    at_FD = (row * HEADS + head * GROUP + m_F)[:, None] * D + d_D[None, :]
                    tl.store(out + at_FD, out_FD.to(out.dtype.element_ty), (m_F < GROUP)[:, None])
                else:
                    put_heads(out_FD, out, scales_GW, W, row, 1, head, q, HEADS, GROUP, D)
    pdl_wait()


def attend(
    q_RND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    rows: PagedRows,
    plan: AttentionPlan,
    *,
    first: int,
    scale: float,
    strict: bool = True,
    quantised: bool = False,
    scale_2KS: Tensor | None = None,
) -> Tensor | Quantised:
    """Return [R, N, D] in the dtype of q: row r attends to key positions [first, position_R[r]]. A
    row without keys gives 0; a dead row gives anything. `quantised`: return these rows in FP8, if
    the heads of one KV head have whole blocks. `scale_2KS`: scales of keys and of values in e4m3.

    Without `strict`, tiles keep no order of splits, so a row's bits depend on its batch.
    """
    count, heads, width = q_RND.shape
    fits = heads // k_SKD.shape[1] * width % FP8_BLOCK == 0
    out: Tensor | Quantised = torch.empty_like(q_RND)
    if quantised and fits:
        out = empty_rows(count, heads * width, q_RND.device)
    attend_into(
        out,
        q_RND,
        k_SKD,
        v_SKD,
        rows,
        plan,
        first=first,
        scale=scale,
        strict=strict,
        scale_2KS=scale_2KS,
    )
    return out


def attend_into(
    out: Tensor | Quantised,
    q_RND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    rows: PagedRows,
    plan: AttentionPlan,
    *,
    first: int,
    scale: float,
    strict: bool,
    scale_2KS: Tensor | None = None,
) -> None:
    """Compute `attend`, rounded once to the dtype of `out`, or to that of q and then to FP8."""
    (_, heads, width), kv_heads = q_RND.shape, k_SKD.shape[1]
    assert width in (16, 32, 64, 128, 256), f"head_dim {width} is no power of two from 16 to 256"
    out_RND, *scales = places(out)
    assert all(tensor.is_contiguous() for tensor in (out_RND, q_RND, k_SKD, v_SKD))
    pages, depth, scale_2 = (
        rows.page_table_QP.shape[1],
        rows.path_RD.shape[1],
        scale * math.log2(math.e),
    )
    states = (plan.top_WN, plan.sum_WN, plan.acc_WND)
    k_cache, v_cache = stored(k_SKD), stored(v_SKD)
    kv_scales = (None, None) if scale_2KS is None else scale_2KS
    if plan.tiles:
        tile_bytes = (plan.tile + 2 * _TILE_STAGES * BLOCK.value) * width * q_RND.element_size()
        attend_tiles[(plan.tile_programs,)](
            q_RND,
            k_cache,
            v_cache,
            out_RND,
            rows.position_R,
            rows.path_RD,
            rows.page_table_QP,
            plan.tile_item_IF,
            plan.count_2,
            plan.state_R,
            *states,
            *scales,
            *kv_scales,
            scale_2,
            pages,
            depth,
            len(k_SKD),
            FIRST=first,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=width,
            PAGE=PAGE_SIZE,
            M=plan.tile,
            SPLITS=strict,
            num_warps=8 if plan.tile == 128 else 4,
            num_stages=_TILE_STAGES if tile_bytes <= _TILE_BYTES else 2,
            **PDL,
        )
    # Programs of one multiprocessor (they are a round of the grid apart) get heads of one row,
    # which read neighbouring lines.
    apart = plan.programs if plan.row_programs % plan.programs == 0 else 1
    _attend_rows[(plan.row_programs,)](
        q_RND,
        k_cache,
        v_cache,
        out_RND,
        rows.path_RD,
        rows.page_table_QP,
        plan.row_item_IF,
        plan.count_2,
        plan.counter_RK,
        *states,
        *scales,
        *kv_scales,
        scale_2,
        pages,
        depth,
        len(k_SKD),
        FIRST=first,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=width,
        PAGE=PAGE_SIZE,
        M=_M,
        M_FOLD=triton.next_power_of_2(heads // kv_heads),
        TILES=plan.tiles,
        AT_ONCE=_AT_ONCE,
        APART=apart,
        num_warps=_WARPS,
        num_stages=plan.row_stages,
        maxnreg=min(248, _REGISTERS // (32 * _WARPS * plan.row_residents) // 8 * 8),
        **PDL,
    )
