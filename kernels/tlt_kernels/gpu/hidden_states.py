"""Copies the states of a step's committed rows into a ring on the device.

`claim` follows `accept`: it gives a slot of the ring to every prompt row, and to every row on a
walk, of the chosen batch slots. `copy_states` then copies those rows; any other row costs one
program that ends at once.

Legend: R rows, V decode rows (the first of R), Q batch slots, C slots of the ring, F features, H
hidden, X = F + H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import KeptRows, RowTable

_BLOCK = 1024
TAG = 2  # numbers: batch slot and position


class StateRing(NamedTuple):
    """States in the order in which rows claimed them; `head` is the next slot."""

    chosen_Q: Tensor  # int32: are this batch slot's rows copied?
    state_CX: Tensor  # activation dtype: features, then the last hidden state
    tag_C2: Tensor  # int32: batch slot and position of the row
    head: Tensor  # int32 [1]

    @staticmethod
    def allocate(
        slots: int, width: int, batch_slots: int, *, dtype: torch.dtype, device: str
    ) -> StateRing:
        """Return an empty ring. `batch_slots` counts the idle one."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return StateRing(
            zeros(batch_slots), zeros(slots, width, dtype=dtype), zeros(slots, TAG), zeros(1)
        )


@triton.jit(do_not_specialize=["R", "V"])
def _claim(
    position_R, batch_slot_R, on_path_V, chosen_Q, slot_R, tag_C2, head_ptr, R, V, C,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give slots to all rows, in order, in one program."""
    pdl_launch()
    pdl_wait()
    head = tl.load(head_ptr)
    for first in range(0, R, BLOCK):
        r_N = first + tl.arange(0, BLOCK)
        position_N = tl.load(position_R + r_N, mask=r_N < R, other=-1)
        live_N = position_N >= 0
        batch_slot_N = tl.load(batch_slot_R + r_N, mask=live_N, other=0)
        walked_N = tl.load(on_path_V + r_N, mask=live_N & (r_N < V), other=1)
        chosen_N = tl.load(chosen_Q + batch_slot_N, mask=live_N, other=0)
        taken_N = live_N & (walked_N == 1) & (chosen_N == 1)
        one_N = taken_N.to(tl.int32)
        slot_N = (head + tl.cumsum(one_N, 0) - one_N) % C
        tl.store(slot_R + r_N, tl.where(taken_N, slot_N, -1), mask=r_N < R)
        tl.store(tag_C2 + 2 * slot_N, batch_slot_N, mask=taken_N)
        tl.store(tag_C2 + 2 * slot_N + 1, position_N, mask=taken_N)
        head = (head + tl.sum(one_N, 0)) % C
    tl.store(head_ptr, head)


def claim(rows: RowTable, kept: KeptRows, ring: StateRing) -> Tensor:
    """Return each row's slot of the ring, [R]; -1 for a row that is not copied. A step has fewer
    rows to copy than the ring has slots.
    """
    slot_R = torch.empty_like(rows.position_R)
    _claim[(1,)](
        rows.position_R,
        rows.batch_slot_R,
        kept.on_path_V,
        ring.chosen_Q,
        slot_R,
        ring.tag_C2,
        ring.head,
        len(rows.position_R),
        len(kept.on_path_V),
        len(ring.state_CX),
        BLOCK=_BLOCK,
        num_warps=4,
        **PDL,
    )
    return slot_R


@triton.jit
def _copy_states(
    slot_R, feature_RF, hidden_RH, state_CX, F, H, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy one row's features and last hidden state, or a block of them, per program."""
    pdl_launch()
    r = tl.program_id(0).to(tl.int64)
    pdl_wait()
    slot = tl.load(slot_R + r).to(tl.int64)
    if slot >= 0:
        x_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        of_features_N = x_N < F
        of_hidden_N = (x_N >= F) & (x_N < F + H)
        value_N = tl.where(
            of_features_N,
            tl.load(feature_RF + r * F + x_N, mask=of_features_N, other=0.0),
            tl.load(hidden_RH + r * H + x_N - F, mask=of_hidden_N, other=0.0),
        )
        tl.store(state_CX + slot * (F + H) + x_N, value_N, mask=x_N < F + H)


def copy_states(slot_R: Tensor, feature_RF: Tensor, hidden_RH: Tensor, ring: StateRing) -> None:
    """Copy the states of the rows that have a slot."""
    features, hidden = feature_RF.shape[1], hidden_RH.shape[1]
    assert feature_RF.is_contiguous() and hidden_RH.is_contiguous()
    assert ring.state_CX.shape[1] == features + hidden, "the ring was made for other widths"
    _copy_states[(len(slot_R), triton.cdiv(features + hidden, _BLOCK))](
        slot_R,
        feature_RF,
        hidden_RH,
        ring.state_CX,
        features,
        hidden,
        BLOCK=_BLOCK,
        num_warps=4,
        **PDL,
    )
