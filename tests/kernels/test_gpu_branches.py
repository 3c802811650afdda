"""Branches on the device against the CPU's: the same chains, grafted to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu  # isort: skip
from tests.kernels.test_gpu_history import grouped_batch_slots, matches_of
from tests.kernels.tree_twins import draft_limits, numpy_of
from tlt_kernels.cpu.match import plant_trie
from tlt_kernels.gpu import growth
from tlt_kernels.gpu.branches import MATCHES, columns, graft
from tlt_kernels.gpu.history import workspace
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Nodes
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.branches import FLOOR, LEFTS, grafted_onto, prior
from tlt_server.speculation.calibration import CELLS
from tlt_server.speculation.drafters.history import DEPTHS, SHARES

EAGLE, HISTORY = 1, 2  # bits of drafters


def chains_of(host: BatchSlots, batch_slot_B: np.ndarray, limits: list[int]) -> Candidates:
    """Return the commonest continuation of each request's matches, as the CPU finds it."""
    pool_T, tokens = host.token_QT.reshape(-1), host.token_QT.shape[1]
    size = sum(limits)
    made = [np.empty(size, np.int32) for _ in range(6)]
    request_N, parent_N, token_N, depth_N, rank_N, cell_N = made
    acceptance_N, at = np.empty(size, np.float32), 0
    for b, limit in enumerate(limits):
        matches = matches_of(host, int(batch_slot_B[b]), MATCHES) if limit else []
        if not matches:
            continue
        common_K, index_K, slot_K = np.array(matches, np.int32).T
        at = plant_trie(
            pool_T,
            slot_K * tokens + index_K + 1,
            slot_K * tokens + host.length_Q[slot_K],
            common_K,
            len(matches),
            limit,
            1,
            np.ones(7 * SHARES * DEPTHS, np.float32),
            SHARES,
            DEPTHS,
            b,
            at,
            request_N,
            parent_N,
            token_N,
            depth_N,
            rank_N,
            acceptance_N,
            cell_N,
        )
    found = (*made[:5], acceptance_N, cell_N)
    return Candidates(*(array[:at] for array in found))


def random_trees(
    rng: np.random.Generator, chains: Candidates, limits: list[int], grown: int, known: int
) -> tuple[Nodes, Candidates]:
    """Return trees of up to `grown` nodes, many of which the chains follow, as a table with empty
    columns and as candidates.
    """
    nodes = Nodes.allocate(len(limits), known, device="cpu")
    listed: list[tuple[int, int, int, int, int, float, int]] = []
    for b, limit in enumerate(limits):
        chain = chains.token_N[chains.request_N == b]
        places, taken = {-1: (-1, 0, 1.0)}, set[tuple[int, int]]()
        for c in range(grown if limit else 0):
            above = int(rng.choice(sorted(places)))
            place, depth, acceptance = places[above]
            likely = chain[depth] if depth < len(chain) and rng.random() < 0.6 else -1
            token = int(likely if likely >= 0 else rng.integers(0, 9))
            if rng.random() < 0.2 or depth == limit or (above, token) in taken:
                continue
            taken.add((above, token))
            acceptance = np.float32(acceptance) * np.float32(rng.uniform(0, 0.7))
            places[c] = len(listed), depth + 1, acceptance
            for tensor, value in zip(
                nodes, (above, token, depth + 1, 3, 0, 0, acceptance), strict=True
            ):
                tensor[b, c] = float(value) if tensor.is_floating_point() else int(value)
            listed.append((b, place, token, depth + 1, 0, float(acceptance), 3))
    fields = [*zip(*listed, strict=True)] or [()] * 7
    arrays = [np.array(column, np.int32) for column in fields]
    arrays[5] = np.array(fields[5], np.float32)
    return Nodes(*(t.to(DEVICE) for t in nodes)), Candidates(*arrays)


def graft_and_check(
    batch_slots: BatchSlots, batch_slot_B: np.ndarray, depth: int, width: int, seed: int
) -> int:
    """Compare branches with those of the CPU; return how many nodes are new."""
    rng, host = np.random.default_rng(seed), BatchSlots(*numpy_of(batch_slots))
    permitted_Q = host.drafters_Q & (EAGLE | HISTORY) == EAGLE | HISTORY
    limits = draft_limits(host._replace(drafters_Q=permitted_Q), batch_slot_B, depth)
    chains = chains_of(host, batch_slot_B, limits)
    grown = growth.columns(depth, width)
    nodes, trees = random_trees(rng, chains, limits, grown, columns(depth, width))
    before = numpy_of(nodes)
    table_Z = rng.uniform(0.3, 1.0, CELLS + len(prior())).astype(np.float32)
    match_BJW = workspace(len(batch_slot_B), MATCHES, batch_slots)
    match_BJW.fill_(1 << 62)
    graft(
        torch.from_numpy(batch_slot_B).to(DEVICE),
        batch_slots,
        nodes,
        CalibrationTable.of(torch.from_numpy(table_Z).to(DEVICE)),
        match_BJW,
        depth=depth,
        width=width,
        drafters=EAGLE | HISTORY,
        first_cell=CELLS,
        lefts=LEFTS,
        floor=FLOOR,
    )
    after = numpy_of(nodes)
    for name in Nodes._fields:
        np.testing.assert_array_equal(
            getattr(after, name)[:, :grown], getattr(before, name)[:, :grown], err_msg=name
        )
    expected = grafted_onto(trees, chains, len(limits), table_Z[CELLS:])
    for b in range(len(limits)):
        mine = np.flatnonzero(expected.request_N == b)
        live = np.flatnonzero(before.acceptance_BC[b] >= 0)
        count = len(mine) - len(live)
        column = {
            int(n): int(c) for n, c in zip(mine, [*live, *range(grown, grown + count)], strict=True)
        }
        for n in mine[len(live) :]:
            c = column[int(n)]
            parent = int(expected.parent_N[n])
            assert after.parent_BC[b, c] == (column[parent] if parent >= 0 else -1)
            assert after.token_BC[b, c] == expected.token_N[n]
            assert after.depth_BC[b, c] == expected.depth_N[n]
            assert after.cell_BC[b, c] == expected.cell_N[n]
            assert after.source_BC[b, c] == after.kv_slot_BC[b, c] == -1
            assert after.acceptance_BC[b, c] == expected.acceptance_N[n], "not the same bits"
        assert (after.acceptance_BC[b, grown + count :] == -1).all()
    return len(expected) - len(trees)


@pytest.mark.parametrize(
    ("depth", "width", "vocabulary"), [(4, 2, 3), (1, 1, 3), (7, 1, 2), (5, 3, 3)]
)
def test_gpu_branches_equal_the_cpu_branches(depth: int, width: int, vocabulary: int) -> None:
    new = 0
    for seed in range(4):
        batch_slots = grouped_batch_slots(seed, 6, 90, vocabulary)
        batch_slots.drafters_Q[:] = torch.tensor([3, 3, -1, 3, EAGLE, 3])
        batch_slot_B = np.array([0, 3, batch_slots.idle, 2, 4], np.int32)
        new += graft_and_check(batch_slots, batch_slot_B, depth, width, seed)
    assert new > depth, "hardly anything is grafted"


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_gpu_branches_of_large_groups_equal_the_cpu_branches() -> None:
    batch_slots = grouped_batch_slots(2, 30, 1500, 12)
    batch_slots.drafters_Q[:] = EAGLE | HISTORY
    batch_slot_B = np.array([*range(24), batch_slots.idle], np.int32)
    assert graft_and_check(batch_slots, batch_slot_B, 7, 4, 0)
