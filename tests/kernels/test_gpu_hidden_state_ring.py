"""Copies of a step's committed rows against plain loops, over several steps around the ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu
from tlt_kernels.gpu.hidden_states import StateRing, claim, copy_states
from tlt_kernels.gpu.tensors import KeptRows, RowTable

Q, SLOTS = 5, 1500


def ints(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "features", "hidden"),
    [
        (torch.float32, 1020, 340),
        (torch.bfloat16, 6, 2),
        pytest.param(torch.bfloat16, 1020, 340, marks=gpu),
    ],
)
def test_the_ring_gets_the_committed_rows_of_chosen_batch_slots(
    dtype: torch.dtype, features: int, hidden: int
) -> None:
    random = np.random.default_rng()
    ring = StateRing.allocate(SLOTS, features + hidden, Q, dtype=dtype, device=DEVICE)
    chosen_Q = random.integers(0, 2, Q)
    ring.chosen_Q.copy_(ints(chosen_Q))
    head = 0
    for decode_rows, prompt_rows in ((7, 0), (0, 1200), (5, 1100), (3, 2)):
        count = decode_rows + prompt_rows
        position_R = np.where(random.random(count) < 0.2, -1, random.integers(0, 99, count))
        batch_slot_R = random.integers(0, Q, count)
        on_path_V = random.integers(-1, 2, decode_rows)
        rows = RowTable.allocate(count, 1, device=DEVICE)._replace(
            position_R=ints(position_R), batch_slot_R=ints(batch_slot_R)
        )
        kept = KeptRows.allocate(1, 1, decode_rows, prompt_rows, 1, device=DEVICE)._replace(
            on_path_V=ints(on_path_V)
        )
        feature_RF = torch.randn(count, features, device=DEVICE).to(dtype)
        hidden_RH = torch.randn(count, hidden, device=DEVICE).to(dtype)
        before_CX = ring.state_CX.clone()
        copy_states(claim(rows, kept, ring), feature_RF, hidden_RH, ring)
        written = set()
        for r in range(count):
            walked = r >= decode_rows or on_path_V[r] == 1
            if position_R[r] < 0 or not walked or not chosen_Q[batch_slot_R[r]]:
                continue
            assert ring.tag_C2[head].tolist() == [batch_slot_R[r], position_R[r]]
            assert torch.equal(ring.state_CX[head], torch.cat([feature_RF[r], hidden_RH[r]]))
            written.add(head)
            head = (head + 1) % SLOTS
        assert int(ring.head) == head
        others = [slot for slot in range(SLOTS) if slot not in written]
        assert torch.equal(ring.state_CX[others], before_CX[others])
