"""The kernels that `tlt bench trees` times launch on any shape."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE

# isort: split
from tlt_kernels.gpu.tensors import RowTable
from tlt_server.bench.trees import TreeCase, calls, followed


@pytest.mark.parametrize(
    "case",
    [
        TreeCase(1, 7, 4, 32, 100),
        TreeCase(3, 3, 1, 12, 100),
        pytest.param(TreeCase(9, 2, 2, 36, 40), marks=pytest.mark.soak),
    ],
)
def test_every_part_runs_twice(case: TreeCase) -> None:
    parts = calls(case, layers=2, device=DEVICE)
    assert set(parts) == {"tree", "rows", "walk", "KV", "history", "branches"}
    for call in 2 * list(parts.values()):
        call()


def test_samples_follow_the_first_child() -> None:
    rows = RowTable.allocate(4, 2, device="cpu")
    rows.parent_R[:] = torch.tensor([-1, 0, 0, 1])
    rows.token_R[:] = torch.tensor([5, 6, 7, 8])
    assert followed(rows, 4).tolist() == [6, 8, 0, 0]
