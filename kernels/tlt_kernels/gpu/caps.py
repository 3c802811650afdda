"""The limit on one request's rows in a step: each tree keeps its best nodes.

Launched before `rows.select_rows` if a request of the batch has a limit; the choice over the whole
batch then sees only the kept nodes. A node's acceptance probability never exceeds its parent's, so
the kept nodes form a tree.

Legend: as in `tensors.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.priority import priority
from tlt_kernels.gpu.target import PDL, lanes, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import BatchSlots, Nodes


@triton.jit(do_not_specialize=["C"])
def _cap_rows(batch_slot_B, max_rows_Q, acceptance_BC, C, CP: tl.constexpr):
    """Cut one request's tree per program."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    most = tl.load(max_rows_Q + tl.load(batch_slot_B + b)) - 1  # the root is a row
    c_C = tl.arange(0, CP)
    key_C = priority(tl.load(acceptance_BC + b * C + c_C, mask=c_C < C, other=-1.0), c_C)
    if tl.sum((key_C >= 0).to(tl.int32)) > most:
        low, high = 0, 0x7FFFFFFF  # their difference is an int32
        while high - low > 1:  # the least key that leaves no more than the limit
            middle = low + (high - low) // 2
            above = tl.sum((key_C >= middle).to(tl.int32))
            low = tl.where(above > most, middle, low)
            high = tl.where(above <= most, middle, high)
        tl.store(acceptance_BC + b * C + c_C, -1.0, mask=(c_C < C) & (key_C < high))


def cap_rows(batch_slot_B: Tensor, batch_slots: BatchSlots, nodes: Nodes) -> None:
    """Leave each request its `max_rows_Q` - 1 nodes of highest acceptance probability; ties go to
    the lower column. The others become empty columns.
    """
    columns = nodes.acceptance_BC.shape[1]
    block = lanes(columns)
    _cap_rows[(batch_slot_B.shape[0],)](
        batch_slot_B,
        batch_slots.max_rows_Q,
        nodes.acceptance_BC,
        columns,
        CP=block,
        num_warps=1 if block <= 256 else 4,
        **PDL,
    )
