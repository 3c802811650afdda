"""Gathers with holes against plain indexing."""

from __future__ import annotations

import torch

from tests.kernels.triton_tests import DEVICE
from tlt_kernels.gpu.gather import gather, previous_hints
from tlt_kernels.gpu.tensors import BatchSlots, RowTable


def test_gather_copies_rows_and_fills_missing_rows_with_zeros() -> None:
    table_NH = torch.randn(7, 1030, device=DEVICE)
    index = [3, -1, 0, 6, 3]
    index_R = torch.tensor(index, dtype=torch.int32, device=DEVICE)
    into_RH = torch.full((5, 1030), float("nan"), dtype=torch.float64, device=DEVICE)
    for found in (gather(table_NH, index_R), gather(table_NH, index_R, out_RH=into_RH)):
        for row, i in zip(found, index, strict=True):
            assert torch.equal(row, table_NH[i].to(row.dtype) if i >= 0 else torch.zeros_like(row))


def test_row_without_a_parent_reads_its_batch_slots_feature() -> None:
    g_RH, hint_QH = torch.randn(4, 96, device=DEVICE), torch.randn(3, 96, device=DEVICE)
    parent_R, batch_slot_R = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([-1, 0, 1, -1], [2, 2, 2, 0])
    )
    rows = RowTable.allocate(4, 1, device=DEVICE)._replace(
        parent_R=parent_R, batch_slot_R=batch_slot_R
    )
    batch_slots = BatchSlots.allocate(3, 1, hidden=96, device=DEVICE)._replace(hint_QH=hint_QH)
    found = previous_hints(g_RH, rows, batch_slots)
    assert torch.equal(found, torch.stack([hint_QH[2], g_RH[0], g_RH[1], hint_QH[0]]))
