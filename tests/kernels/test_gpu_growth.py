"""Draft trees on the device against their slow twin: same nodes, same rows, same paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu  # isort: skip
from tests.kernels.tree_twins import (
    EDGES,
    GrownTree,
    children,
    draft_limits,
    kv_slot_of,
    make_batch_slots,
    numpy_of,
    poison,
    table,
)
from tlt_kernels.gpu.growth import FLOOR, columns, grow, roots
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Draft, Nodes

FIRST_KV_SLOT, TRASH = 5000, 9999


def check_level(
    trees: list[GrownTree],
    draft: Draft,
    nodes: Nodes,
    batch_slots: BatchSlots,
    batch_slot_B: np.ndarray,
    first: int,
    per: int,
) -> None:
    found, known = numpy_of(draft), numpy_of(nodes)
    for b, tree in enumerate(trees):
        for c in range(known.acceptance_BC.shape[1]):
            node = tree.nodes.get(c)
            if node is None:
                assert known.acceptance_BC[b, c] == -1, f"acceptance_BC[{b}, {c}]"
                continue
            for name in ("parent", "token", "depth", "cell", "source", "kv_slot", "acceptance"):
                assert getattr(known, f"{name}_BC")[b, c] == node[name], f"{name}_BC[{b}, {c}]"
        for j in range(per):
            x, row = first + b * per + j, tree.rows[j]
            if row is None:
                assert found.rows.position_R[x] == -1, f"row {x}"
                assert found.rows.kv_slot_R[x] == TRASH, f"row {x}"
                assert found.rows.batch_slot_R[x] == batch_slots.idle, f"row {x}"
                assert found.acceptance_X[x] == -1, f"row {x}"
                assert found.rows.base_R[x] == 0, f"row {x}"
                assert (found.rows.path_RD[x] == -1).all(), f"row {x}"
                continue
            node = tree.nodes[row[0]] if row[0] >= 0 else None
            length = int(batch_slots.length_Q[batch_slot_B[b]])
            path = [tree.nodes[c]["kv_slot"] for c in tree.path(row[0])]
            expected = {
                "token": node["token"]
                if node
                else int(batch_slots.token_QT[batch_slot_B[b], length - 1]),
                "position": length - 1 + len(path),
                "kv_slot": path[-1]
                if path
                else kv_slot_of(batch_slots, batch_slot_B[b], length - 1),
                "batch_slot": batch_slot_B[b],
                "base": length,
            }
            for name, value in expected.items():
                assert getattr(found.rows, f"{name}_R")[x] == value, f"{name}_R[{x}]"
            assert found.rows.path_RD[x].tolist() == path + [-1] * (
                found.rows.path_RD.shape[1] - len(path)
            ), f"path_RD[{x}]"
            assert (
                found.source_X[x] == (node["source"] if node else batch_slot_B[b])
                and found.node_X[x] == row[0]
            ), f"source or node of row {x}"
            assert found.acceptance_X[x] == (node["acceptance"] if node else 1), (
                f"acceptance_X[{x}]"
            )


def grow_and_check(
    requests: int,
    depth: int,
    width: int,
    seed: int,
    *,
    spare_columns: int = 3,
    floor: float = FLOOR,
) -> None:
    rng = np.random.default_rng(seed)
    batch_slots = make_batch_slots(rng, requests + 3, 70)
    batch_slot_B = np.append(
        rng.permutation(requests + 2)[: requests - 1], batch_slots.idle
    ).astype(np.int32)
    draft = Draft.allocate(requests, depth, width, device=DEVICE)
    nodes = Nodes.allocate(requests, columns(depth, width) + spare_columns, device=DEVICE)
    poison(draft)
    poison(nodes)
    calibration = table(rng)
    edges = torch.from_numpy(EDGES).to(DEVICE)
    host = numpy_of(batch_slots)
    limits = draft_limits(host, batch_slot_B, depth)
    trees = [
        GrownTree(limit, max(int(host.length_Q[q]) - 1, 0))
        for q, limit in zip(batch_slot_B, limits, strict=True)
    ]

    roots(
        torch.from_numpy(batch_slot_B).to(DEVICE),
        batch_slots,
        draft,
        nodes,
        depth=depth,
        trash=TRASH,
    )
    check_level(trees, draft, nodes, BatchSlots(*host), batch_slot_B, 0, 1)
    for level in range(depth):
        first, count = Draft.level(requests, width, level)
        per = count // requests
        token_ML, z_ML = children(rng, count, width)
        grow(
            level,
            token_ML,
            z_ML,
            draft,
            nodes,
            calibration,
            edges,
            requests=requests,
            depth=depth,
            width=width,
            first_kv_slot=FIRST_KV_SLOT,
            trash=TRASH,
            idle=batch_slots.idle,
            floor=floor,
        )
        for b, tree in enumerate(trees):
            ids = [first + b * per + j for j in range(per)]
            mine = slice(b * per, (b + 1) * per)
            tree.plant(
                columns(level, width),
                ids,
                *(t.cpu().numpy() for t in (token_ML[mine], z_ML[mine], calibration.acceptance_Z)),
                width,
            )
            if level < depth - 1:
                next_first, _ = Draft.level(requests, width, level + 1)
                tree.pick(
                    width,
                    floor,
                    [next_first + b * width + j for j in range(width)],
                    FIRST_KV_SLOT - requests,
                )
        if level < depth - 1:
            check_level(trees, draft, nodes, BatchSlots(*host), batch_slot_B, next_first, width)
        else:
            check_level(trees, draft, nodes, BatchSlots(*host), batch_slot_B, 0, 0)


@pytest.mark.parametrize(
    ("requests", "depth", "width"),
    [(1, 1, 1), (2, 4, 1), (3, 1, 3), (2, 3, 2), (3, 5, 3), (2, 4, 4), (9, 3, 2)],
)
def test_draft_trees_grow_like_their_twin(requests: int, depth: int, width: int) -> None:
    for seed in range(3):
        grow_and_check(requests, depth, width, seed)


def test_high_acceptance_floor_leaves_rows_dead() -> None:
    grow_and_check(4, 4, 3, 5, floor=0.7)


def test_tied_acceptance_goes_to_the_lower_column() -> None:
    batch_slots = make_batch_slots(np.random.default_rng(0), 2, 40)
    batch_slots.done_Q[0] = 0
    batch_slots.drafters_Q[0] = 1
    batch_slots.max_depth_Q[0] = 9
    batch_slots.length_Q[0] = 5
    batch_slots.limit_Q[0] = 40
    batch_slots.capacity_Q[0] = 32
    draft = Draft.allocate(1, 2, 2, device=DEVICE)
    nodes = Nodes.allocate(1, columns(2, 2), device=DEVICE)
    roots(
        torch.tensor([0], dtype=torch.int32, device=DEVICE),
        batch_slots,
        draft,
        nodes,
        depth=2,
        trash=TRASH,
    )
    even = CalibrationTable.of(torch.full((256,), 0.5, device=DEVICE))
    grow(
        0,
        torch.tensor([[7, 8]], dtype=torch.int32, device=DEVICE),
        torch.zeros(1, 2, device=DEVICE),
        draft,
        nodes,
        even,
        torch.from_numpy(EDGES).to(DEVICE),
        requests=1,
        depth=2,
        width=2,
        first_kv_slot=FIRST_KV_SLOT,
        trash=TRASH,
        idle=batch_slots.idle,
    )
    assert draft.node_X.tolist() == [-1, 0, 1]
    assert draft.rows.token_R.tolist()[1:] == [7, 8]


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize(
    ("requests", "depth", "width"), [(1, 8, 4), (64, 8, 4), (8, 6, 8), (3, 12, 1)]
)
def test_large_draft_trees_grow_like_their_twin(requests: int, depth: int, width: int) -> None:
    grow_and_check(requests, depth, width, 1)
