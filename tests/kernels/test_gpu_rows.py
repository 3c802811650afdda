"""Row layout on the device: the best nodes of a batch as whole trees, then prefill chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu  # isort: skip
from tests.kernels.tree_twins import (
    kv_slot_of,
    make_batch_slots,
    node_key,
    numpy_of,
    poison,
    verified_rows,
)
from tlt_kernels.gpu.priority import compared
from tlt_kernels.gpu.rows import layout_prefill, select_rows
from tlt_kernels.gpu.tensors import BatchSlots, KeptRows, Nodes, PrefillChunks, RowTable, Trees

SCRATCH, TRASH = 5000, 9999


def random_nodes(
    rng: np.random.Generator, requests: int, columns: int, depth: int, *, levels: int = 0
) -> tuple[Nodes, list[dict[int, Any]]]:
    """Return random trees with gaps between their columns. With `levels` there are few different
    survivals, and so ties.
    """
    nodes = Nodes.allocate(requests, columns, device="cpu")
    nodes.parent_BC[:], nodes.token_BC[:], nodes.depth_BC[:] = -77, -77, -77
    nodes.cell_BC[:] = torch.from_numpy(rng.integers(0, 256, (requests, columns), dtype=np.int32))
    trees: list[dict[int, Any]] = []
    for b in range(requests):
        tree: dict[int, Any] = {}
        for c in range(columns):
            parents = [-1, *(p for p, node in tree.items() if node["depth"] < depth)]
            if rng.random() < 0.3:
                continue
            parent = parents[int(rng.integers(0, len(parents)))]
            above = np.float32(1) if parent < 0 else tree[parent]["acceptance"]
            one_of = rng.integers(1, levels + 1) / levels if levels else rng.uniform(0.01, 1.0)
            factor = np.float32(one_of)
            tree[c] = {
                "parent": parent,
                "token": int(rng.integers(0, 50)),
                "depth": 1 if parent < 0 else tree[parent]["depth"] + 1,
                "acceptance": np.float32(above * factor),
            }
            for name, value in tree[c].items():
                getattr(nodes, f"{name}_BC")[b, c] = float(value)
        trees.append(tree)
    return Nodes(*(t.to(DEVICE) for t in nodes)), trees


def check_decode_rows(
    found: Any,
    trees: Any,
    expected: list[dict[str, Any]],
    entries: list[tuple[int, int]],
    batch_slots: BatchSlots,
    decode_rows: int,
    columns: int,
) -> None:
    path_depth = found.path_RD.shape[1]
    for r, row in enumerate(expected):
        for name in ("token", "position", "kv_slot", "batch_slot", "base", "parent"):
            assert getattr(found, f"{name}_R")[r] == row[name], f"{name}_R[{r}]"
        path = row["path"] + [-1] * (path_depth - len(row["path"]))
        assert found.path_RD[r].tolist() == path, f"path_RD[{r}]"
        node = row["request"] * columns + row["column"] if row["column"] >= 0 else -1
        assert trees.node_V[r] == node, f"node_V[{r}]"
    check_dead(found, range(len(expected), decode_rows), batch_slots)
    assert (trees.node_V[len(expected) : decode_rows] == -1).all()
    pairs = zip(trees.root_E.tolist(), trees.count_E.tolist(), strict=True)
    assert [*pairs][: len(entries)] == entries, "root_E and count_E"
    dead = [-1] * (decode_rows - len(expected))
    assert trees.sample_row_S[:decode_rows].tolist() == [*range(len(expected)), *dead]


def check_dead(found: Any, rows: range, batch_slots: BatchSlots) -> None:
    part = slice(rows.start, rows.stop)
    assert (found.position_R[part] == -1).all()
    assert (found.kv_slot_R[part] == TRASH).all()
    assert (found.batch_slot_R[part] == batch_slots.idle).all()
    assert (found.base_R[part] == 0).all()
    assert (found.path_RD[part] == -1).all()


def select_and_check(
    requests: int,
    columns: int,
    depth: int,
    decode_rows: int,
    seed: int,
    *,
    levels: int = 0,
    with_nodes: bool = True,
) -> None:
    rng = np.random.default_rng(seed)
    batch_slots = make_batch_slots(rng, requests + 3, 70)
    host = numpy_of(batch_slots)
    chosen = rng.permutation(requests + 2)[: requests - 1]
    batch_slot_B = np.append(chosen, batch_slots.idle).astype(np.int32)
    nodes, tables = random_nodes(rng, requests, columns, depth, levels=levels)
    for b, q in enumerate(batch_slot_B):
        if host.done_Q[q] or not with_nodes:
            tables[b] = {}
            nodes.acceptance_BC[b] = -1
    rows = RowTable.allocate(decode_rows, depth, device=DEVICE)
    trees = Trees.allocate(requests, 0, decode_rows, device=DEVICE)
    kept = KeptRows.allocate(requests, 0, decode_rows, 0, depth, device=DEVICE)
    made = rows, trees, kept
    for group in made:
        poison(group)
    slot_B, found_nodes = torch.from_numpy(batch_slot_B).to(DEVICE), nodes if with_nodes else None
    room = {"decode_rows": decode_rows, "scratch_start": SCRATCH, "trash": TRASH}
    select_rows(slot_B, batch_slots, found_nodes, *made, **room)
    expected, entries = verified_rows(BatchSlots(*host), batch_slot_B, tables, decode_rows, SCRATCH)
    check_decode_rows(
        numpy_of(rows), numpy_of(trees), expected, entries, batch_slots, decode_rows, columns
    )
    assert (kept.page_R == -1).all()


@pytest.mark.parametrize(
    ("requests", "columns", "depth", "decode_rows"),
    [
        (1, 1, 1, 2),
        (1, 9, 4, 6),
        (1, 9, 4, 16),
        (3, 7, 3, 3),
        (3, 7, 3, 11),
        (5, 20, 6, 37),
        (2, 5, 9, 64),
    ],
)
def test_the_best_nodes_are_laid_out_as_whole_trees(
    requests: int, columns: int, depth: int, decode_rows: int
) -> None:
    for seed in range(4):
        select_and_check(requests, columns, depth, decode_rows, seed)


def test_ties_at_the_row_limit_fill_rows_and_keep_trees_whole() -> None:
    for seed in range(4):
        select_and_check(4, 12, 4, 17, seed, levels=1)
        select_and_check(4, 12, 4, 13, seed, levels=3)


def test_every_live_request_has_a_root_row_without_drafts() -> None:
    select_and_check(5, 1, 1, 5, 0, with_nodes=False)
    select_and_check(5, 4, 3, 8, 0, with_nodes=False)


@pytest.mark.parametrize(
    ("counts", "prefill_rows"),
    [([5], 5), ([3, 0, 14, 0], 32), ([1, 16, 2], 19), ([0, 0], 4), ([70, 65], 150)],
)
@pytest.mark.parametrize(("requests", "decode_rows"), [(2, 3), (0, 0)])
def test_prefill_chunks_follow_the_decode_rows(
    counts: list[int], prefill_rows: int, requests: int, decode_rows: int
) -> None:
    rng = np.random.default_rng(len(counts))
    batch_slots = make_batch_slots(rng, 8, 100)
    host, chunks = numpy_of(batch_slots), len(counts)
    batch_slot_W = rng.permutation(7)[:chunks].astype(np.int32)
    start_W = np.zeros(chunks, np.int32)
    for w, count in enumerate(counts):
        length = min(count + 20 + w % 2, 100)
        batch_slots.length_Q[int(batch_slot_W[w])] = host.length_Q[batch_slot_W[w]] = length
        start_W[w] = 20 if count else 0  # every other chunk reaches its end
    rows = RowTable.allocate(decode_rows + prefill_rows, 2, device=DEVICE)
    trees = Trees.allocate(requests, chunks, decode_rows, device=DEVICE)
    kept = KeptRows.allocate(requests, chunks, decode_rows, prefill_rows, 2, device=DEVICE)
    made = rows, trees, kept
    for group in made:
        poison(group)
    if not requests:
        none_B = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        room = {"decode_rows": 0, "scratch_start": SCRATCH, "trash": TRASH}
        select_rows(none_B, batch_slots, None, *made, **room)
        assert (rows.token_R == -77).all(), "rows were written without a request"
    described_W = (batch_slot_W, start_W, np.array(counts, np.int32))
    work = PrefillChunks._make(torch.from_numpy(each).to(DEVICE) for each in described_W)
    sizes = {"requests": requests, "decode_rows": decode_rows, "prefill_rows": prefill_rows}
    layout_prefill(work, batch_slots, *made, **sizes, trash=TRASH)
    found, described, page_R = numpy_of(rows), numpy_of(trees), kept.page_R.cpu().numpy()
    assert (found.token_R[:decode_rows] == -77).all(), "decode rows were written"
    r = decode_rows
    for w, count in enumerate(counts):
        q, end = int(batch_slot_W[w]), int(start_W[w]) + count
        for i in range(count):
            position = int(start_W[w]) + i
            kv_slot = kv_slot_of(BatchSlots(*host), q, position)
            expected = {
                "token": host.token_QT[q, position],
                "position": position,
                "kv_slot": kv_slot,
                "batch_slot": q,
                "base": end,
                "parent": r - 1 if i else -1,
            }
            for name, value in expected.items():
                assert getattr(found, f"{name}_R")[r] == value, f"{name}_R[{r}]"
            assert page_R[r] == (kv_slot // 16 if position % 16 == 15 else -1), f"page_R[{r}]"
            r += 1
        samples = count > 0 and end == host.length_Q[q]
        assert described.root_E[requests + w] == (r - 1 if count else -1), f"root of work {w}"
        assert described.count_E[requests + w] == samples, f"count of work {w}"
        sampled = r - 1 if samples else -1
        assert described.sample_row_S[decode_rows + w] == sampled, f"sample of work {w}"
    check_dead(found, range(r, len(page_R)), batch_slots)
    assert (found.path_RD[decode_rows:] == -1).all()
    assert (page_R[r:] == -1).all()


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize(
    ("requests", "columns", "depth", "decode_rows"),
    [(1, 116, 8, 64), (32, 116, 8, 256), (64, 456, 8, 512)],
)
def test_large_batches_are_laid_out_like_their_twin(
    requests: int, columns: int, depth: int, decode_rows: int
) -> None:
    select_and_check(requests, columns, depth, decode_rows, 1)
    select_and_check(requests, columns, depth, decode_rows, 2, levels=2)


def test_acceptances_compare_equal_exactly_where_their_keys_do() -> None:
    rng = np.random.default_rng(5)
    acceptance_N = np.exp2(rng.uniform(-18, 0, 4000)).astype(np.float32)
    acceptance_N[1::2] = acceptance_N[::2] * (1 + rng.uniform(0, 2e-3, 2000))  # close to each other
    acceptance_N[-3:] = 1.0, 0.0, -1.0
    coarse_N = compared(torch.from_numpy(acceptance_N)).numpy()
    key_N = np.array([node_key(float(each), 0, 0)[0] for each in acceptance_N[:-2]])
    pairs = key_N[:, None] < key_N, coarse_N[:-2, None] > coarse_N[:-2]
    assert np.array_equal(*pairs)
    assert len(np.unique(key_N)) < len(key_N)
    assert np.array_equal(coarse_N[-2:], acceptance_N[-2:])
