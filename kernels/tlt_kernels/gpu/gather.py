"""Row gathers, in which an index of -1 stands for a dead row and gives zeros, and each row's
feature from the preceding row.

Legend: N table rows, R rows, H width, Q batch slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import BatchSlots, RowTable

_BLOCK = 1024


@triton.jit
def _gather(
    table_ptr, index_R, other_ptr, other_R, out_ptr, width, OTHER: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy row `index` of the table; if that is -1, row `other` of the other table, or zeros."""
    pdl_launch()
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < width
    pdl_wait()
    index = tl.load(index_R + r).to(tl.int64)
    value = tl.load(table_ptr + index * width + h, inside & (index >= 0), 0.0)
    if OTHER:
        other = tl.load(other_R + r).to(tl.int64)
        value = tl.where(
            index >= 0,
            value,
            tl.load(other_ptr + other * width + h, inside & (index < 0) & (other >= 0), 0.0),
        )
    tl.store(out_ptr + r * width + h, value, inside)


def gather(table_NH: Tensor, index_R: Tensor, *, out_RH: Tensor | None = None) -> Tensor:
    """Return table[index], zeros for index -1: [R, H] in the dtype of `out_RH`, or of the table."""
    if out_RH is None:
        out_RH = torch.empty(
            len(index_R), table_NH.shape[1], dtype=table_NH.dtype, device=table_NH.device
        )
    grid = len(index_R), triton.cdiv(table_NH.shape[1], _BLOCK)
    _gather[grid](
        table_NH,
        index_R,
        table_NH,
        index_R,
        out_RH,
        table_NH.shape[1],
        OTHER=False,
        BLOCK=_BLOCK,
        **PDL,
    )
    return out_RH


def previous_hints(g_RH: Tensor, rows: RowTable, batch_slots: BatchSlots) -> Tensor:
    """Return each row's input feature, [R, H]: g of the preceding row or, if an earlier step
    computed that row, the stored feature of the row's batch slot.
    """
    out_RH = torch.empty_like(g_RH)
    grid = len(g_RH), triton.cdiv(g_RH.shape[1], _BLOCK)
    _gather[grid](
        g_RH,
        rows.parent_R,
        batch_slots.hint_QH,
        rows.batch_slot_R,
        out_RH,
        g_RH.shape[1],
        OTHER=True,
        BLOCK=_BLOCK,
        **PDL,
    )
    return out_RH
