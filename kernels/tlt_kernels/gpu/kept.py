"""Stores the rows that a step keeps: the KV of accepted drafts moves to its pages, and the features
that the next draft reads are stored.

Both launches follow `accept`, which fills `KeptRows`.

Legend: as in `tensors.py`; L layers, X elements and Y scales of a KV slot, S KV slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import BatchSlots, KeptRows


@triton.jit
def _commit_kv(
    count_B,
    source_BD,
    target_BD,
    k_LSX,
    v_LSX,
    scale_LYS,
    layer_stride,
    X,
    S,
    Y,
    D: tl.constexpr,
    DP: tl.constexpr,
    XB: tl.constexpr,
    YB: tl.constexpr,
):
    """Move one request's KV in one layer and one block of a KV slot per program."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    count = tl.load(count_B + b)
    if count <= 0:
        return
    d_D = tl.arange(0, DP)
    kept_D = d_D < count
    x_1X = tl.program_id(2) * XB + tl.arange(0, XB)[None, :]
    layer = tl.program_id(1).to(tl.int64)
    source_D1 = tl.load(source_BD + b * D + d_D, mask=kept_D, other=0).to(tl.int64)[:, None]
    target_D1 = tl.load(target_BD + b * D + d_D, mask=kept_D, other=0).to(tl.int64)[:, None]
    source_DX = layer * layer_stride + source_D1 * X + x_1X
    target_DX = layer * layer_stride + target_D1 * X + x_1X
    moved_DX = kept_D[:, None] & (x_1X < X)
    k_DX = tl.load(k_LSX + source_DX, mask=moved_DX)
    v_DX = tl.load(v_LSX + source_DX, mask=moved_DX)
    tl.store(k_LSX + target_DX, k_DX, mask=moved_DX)
    tl.store(v_LSX + target_DX, v_DX, mask=moved_DX)
    if scale_LYS is not None:
        if tl.program_id(2) == 0:
            y_1Y = tl.arange(0, YB)[None, :]
            moved_DY, row_1Y = kept_D[:, None] & (y_1Y < Y), (layer * Y + y_1Y) * S
            scale_DY = tl.load(scale_LYS + row_1Y + source_D1, mask=moved_DY)
            tl.store(scale_LYS + row_1Y + target_D1, scale_DY, mask=moved_DY)


def commit_kv(
    kept: KeptRows, k_LSKD: Tensor, v_LSKD: Tensor, scale_L2KS: Tensor | None = None
) -> None:
    """Copy the KV of accepted rows from scratch to their pages, in all layers, with scales if there
    are any. The elements of a KV slot are contiguous.
    """
    layers, kv_slots, heads, width = k_LSKD.shape
    requests, depth = kept.source_BD.shape
    elements = heads * width
    if not layers or not requests:
        return
    assert k_LSKD.stride() == v_LSKD.stride() and k_LSKD.stride()[1:] == (elements, width, 1)
    depth_block = triton.next_power_of_2(depth)
    block = min(triton.next_power_of_2(elements), max(64, 4096 // depth_block))
    _commit_kv[(requests, layers, triton.cdiv(elements, block))](
        kept.count_B,
        kept.source_BD,
        kept.target_BD,
        k_LSKD,
        v_LSKD,
        scale_L2KS,
        k_LSKD.stride(0),
        elements,
        kv_slots,
        2 * heads,
        D=depth,
        DP=depth_block,
        XB=block,
        YB=triton.next_power_of_2(2 * heads),
        num_warps=4,
        **PDL,
    )


@triton.jit(do_not_specialize=["R"])
def _store_hints(
    page_R,
    R,
    hint_row_E,
    hint_batch_slot_E,
    g_RH,
    hint_QH,
    page_hint_PH,
    H: tl.constexpr,
    HP: tl.constexpr,
):
    """Store one page's feature, or one entry's feature, per program."""
    pdl_launch()
    r = tl.program_id(0)
    pdl_wait()
    h_H = tl.arange(0, HP)
    if r < R:
        page = tl.load(page_R + r)
        if page >= 0:
            g_H = tl.load(g_RH + r.to(tl.int64) * H + h_H, mask=h_H < H)
            tl.store(page_hint_PH + page.to(tl.int64) * H + h_H, g_H, mask=h_H < H)
    else:
        row = tl.load(hint_row_E + r - R)
        if row >= 0:
            g_H = tl.load(g_RH + row.to(tl.int64) * H + h_H, mask=h_H < H)
            tl.store(
                hint_QH + tl.load(hint_batch_slot_E + r - R).to(tl.int64) * H + h_H,
                g_H,
                mask=h_H < H,
            )


def store_hints(
    kept: KeptRows, g_RH: Tensor, batch_slots: BatchSlots, page_hint_PH: Tensor
) -> None:
    """Store the fused feature of each sequence's last position, and that of the last position of
    every page that this step filled.
    """
    rows, hidden = kept.page_R.shape[0], g_RH.shape[1]
    _store_hints[(rows + kept.hint_row_E.shape[0],)](
        kept.page_R,
        rows,
        kept.hint_row_E,
        kept.hint_batch_slot_E,
        g_RH,
        batch_slots.hint_QH,
        page_hint_PH,
        H=hidden,
        HP=triton.next_power_of_2(hidden),
        num_warps=4,
        **PDL,
    )
