"""The limit on one request's rows: its best nodes stay, and they are a tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE  # isort: skip
from tests.kernels.test_gpu_rows import random_nodes
from tests.kernels.tree_twins import node_key, numpy_of
from tlt_kernels.gpu.caps import cap_rows
from tlt_kernels.gpu.tensors import BatchSlots, Nodes
from tlt_kernels.gpu.upload import UNLIMITED

# Limits of the idle batch slot, and of requests that take no drafts, few, all.
LIMITS = (0, 1, 2, 5, 16, UNLIMITED)


@pytest.mark.parametrize(("columns", "depth", "levels"), [(1, 1, 0), (20, 5, 0), (20, 5, 2)])
def test_row_cap_keeps_the_best_nodes_of_each_request(
    columns: int, depth: int, levels: int
) -> None:
    rng = np.random.default_rng(columns + levels)
    requests = len(LIMITS)
    nodes, trees = random_nodes(rng, requests, columns, depth, levels=levels)
    before = Nodes(*numpy_of(nodes))
    batch_slots = BatchSlots.allocate(requests + 1, 32, hidden=4, device=DEVICE)
    batch_slot_B = torch.from_numpy(rng.permutation(requests).astype(np.int32)).to(DEVICE)
    batch_slots.max_rows_Q[batch_slot_B.long()] = torch.tensor(
        LIMITS, dtype=torch.int32, device=DEVICE
    )
    cap_rows(batch_slot_B, batch_slots, nodes)
    found = Nodes(*numpy_of(nodes))
    for b, (limit, tree) in enumerate(zip(LIMITS, trees, strict=True)):
        ranked = sorted(tree, key=lambda c: node_key(tree[c]["acceptance"], c, 0))  # noqa: B023
        kept = {*ranked[: max(0, limit - 1)]}
        stays = np.array([c in kept for c in range(columns)])
        assert {tree[c]["parent"] for c in kept} <= {-1, *kept}, "what stays is a tree"
        np.testing.assert_array_equal(
            found.acceptance_BC[b], np.where(stays, before.acceptance_BC[b], -1), err_msg=str(limit)
        )
    for name in ("parent_BC", "token_BC", "depth_BC", "cell_BC"):
        np.testing.assert_array_equal(getattr(found, name), getattr(before, name))
