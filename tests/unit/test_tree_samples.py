"""Trees of a device's step, as the host reads them."""

from __future__ import annotations

import numpy as np
import torch

from tlt_kernels.gpu.tensors import Nodes
from tlt_server.engine.gpu.steps.tree_samples import EVERY, MAX_NODES, TreeSampler, read
from tlt_server.speculation.branches import RANK
from tlt_server.speculation.estimate import AcceptanceEstimate


def nodes(parent: list[list[int]], depth: list[list[int]], acceptance: list[list[float]]) -> Nodes:
    empty = Nodes.allocate(len(parent), len(parent[0]), device="cpu")
    return empty._replace(
        parent_BC=torch.tensor(parent, dtype=torch.int32),
        depth_BC=torch.tensor(depth, dtype=torch.int32),
        acceptance_BC=torch.tensor(acceptance, dtype=torch.float32),
    )


def test_sampled_trees_are_read_back_as_candidates() -> None:
    grown = nodes(
        [[-1, -1, 0, 0], [-1, -1, 1, -1], [-1, -1, -1, -1]],
        [[1, 1, 2, 2], [1, 1, 2, -1], [-1, -1, -1, -1]],
        [[0.5, 0.25, 0.4, 0.1], [0.5, 0.3, 0.2, -1.0], [-1.0, -1.0, -1.0, -1.0]],
    )
    sample = TreeSampler(2, pinned=False).launch(grown, 2, 4)
    assert sample is not None
    drafted = read(sample, verified=3)
    found = drafted.candidates
    assert found.request_N.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.parent_N.tolist() == [-1, -1, 0, 0, -1, -1, 5]
    assert found.rank_N.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert found.depth_N.tolist() == [1, 1, 2, 2, 1, 1, 2]
    assert drafted.requests == 2
    np.testing.assert_allclose(drafted.predicted, 0.5 + 0.5 + 0.4, rtol=1e-6)
    estimate = AcceptanceEstimate((1, 2), (1, 2))
    for _ in range(200):
        estimate.see(found, drafted.requests)
    np.testing.assert_allclose(estimate.gain(1, 1, np.array([1.0])), (0.5 + 0.5) / 2, rtol=0.01)


def test_a_recording_gets_tokens_and_cells_of_every_step() -> None:
    grown = nodes([[-1, 0, 0], [-1, 0, -1]], [[1, 2, 2], [1, 2, -1]], [[0.5, 0.4, 0.1], [1, 1, -1]])
    grown.token_BC.copy_(torch.tensor([[7, 8, 9], [5, 6, -1]]))
    grown.cell_BC.copy_(torch.tensor([[1, 2, 3], [255, 0, -1]]))
    sampler = TreeSampler(2, pinned=False, every=1, most=6, detailed=True)
    for _ in range(3):
        sample = sampler.launch(grown, 2, 3)
        assert sample is not None
        found = read(sample, verified=0).candidates
        assert found.token_N.tolist() == [7, 8, 9, 5, 6]
        assert found.cell_N.tolist() == [1, 2, 3, 255, 0]


def test_branch_nodes_have_no_draft_rank() -> None:
    grown = nodes(
        [[-1, 0, 0, 2], [-1, -1, -1, 2]],
        [[1, 2, 2, 3], [1, -1, 1, 2]],
        [[0.5, 0.4, 0.3, 0.2], [0.5, -1.0, 0.3, 0.2]],
    )
    sample = TreeSampler(2, pinned=False).launch(grown, 2, 2)
    assert sample is not None
    found = read(sample, verified=3).candidates
    assert found.parent_N.tolist() == [-1, 0, 0, 2, -1, -1, 5]
    assert found.rank_N.tolist() == [0, 0, RANK, RANK, 0, RANK, RANK]


def test_large_batches_are_sampled_in_part() -> None:
    grown = nodes([[-1] * 100] * 64, [[1] * 100] * 64, [[0.5] * 100] * 64)
    sampler = TreeSampler(2, pinned=False)
    samples = [sampler.launch(grown, 64, 100) for _ in range(2 * EVERY)]
    assert sum(sample is not None for sample in samples) == 2
    assert samples[0] is not None and samples[0].requests == MAX_NODES // 100
    assert read(samples[0], verified=10).predicted == 0.0  # it says nothing of the whole batch
