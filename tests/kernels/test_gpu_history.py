"""History drafting on the device against a dictionary of suffixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu  # isort: skip
from tests.kernels.tree_twins import draft_limits, make_batch_slots, numpy_of
from tlt_kernels.cpu.match import length_bucket
from tlt_kernels.gpu.history import MEMBERS, history_nodes, workspace
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Nodes


def matches_of(batch_slots: BatchSlots, batch_slot: int, width: int) -> list[tuple[int, int, int]]:
    """Return (tokens in common, index of the last of them, batch slot), best first."""
    own = batch_slots.token_QT[batch_slot, : batch_slots.length_Q[batch_slot]].tolist()
    found, group = [], batch_slots.group_Q[batch_slot]
    same = np.flatnonzero((batch_slots.group_Q == group) & (group >= 0)).tolist()
    others = [q for q in same if q != batch_slot]
    for q in (batch_slot, *others[: MEMBERS - 1]):
        text = batch_slots.token_QT[q, : batch_slots.length_Q[q]].tolist()
        first = 0 if q == batch_slot else int(batch_slots.first_Q[q])
        for i in range(first, len(text) - 1):
            common = 0
            while (
                common < min(16, len(own), i + 1 - first) and text[i - common] == own[-1 - common]
            ):
                common += 1
            if common >= 2:
                found.append((common, i, q))
    found = sorted(found, reverse=True)[:width]
    return [match for match in found if 2 * match[0] >= found[0][0]]


def trie_of(
    batch_slots: BatchSlots, batch_slot: int, limit: int, width: int, table: np.ndarray
) -> dict[int, dict[str, Any]]:
    """Return the nodes by column."""
    matches = matches_of(batch_slots, batch_slot, width)
    nodes: dict[int, dict[str, Any]] = {}
    way = [-1] * len(matches)  # the node that each match has reached
    alive = [True] * len(matches)
    for d in range(limit):
        for m, (_, i, q) in enumerate(matches):
            alive[m] &= i + 1 + d < batch_slots.length_Q[q]
        tokens = [
            int(batch_slots.token_QT[q, i + 1 + d]) if alive[m] else None
            for m, (_, i, q) in enumerate(matches)
        ]
        reached = list(way)
        for m in range(len(matches)):
            if not alive[m]:
                continue
            siblings = [n for n in range(len(matches)) if alive[n] and way[n] == way[m]]
            same = [n for n in siblings if tokens[n] == tokens[m]]
            column = d * width + same[0]
            reached[m] = column
            if same[0] != m:
                continue
            length = max(matches[n][0] for n in same) + d
            share = -(-len(same) * 8 // len(siblings)) - 1
            cell = (length_bucket(length) * 8 + share) * 8 + min(d, 7)
            above = nodes[way[m]]["acceptance"] if way[m] >= 0 else 1.0
            nodes[column] = {
                "parent": way[m],
                "token": tokens[m],
                "depth": d + 1,
                "cell": cell,
                "source": -1,
                "kv_slot": -1,
                "acceptance": above * min(table[cell], 0.999),
            }
        way = reached
    return nodes


def draft_and_check(
    batch_slots: BatchSlots, batch_slot_B: np.ndarray, depth: int, width: int, seed: int
) -> int:
    """Compare drafts with their twin; return how many nodes there were."""
    rng = np.random.default_rng(seed)
    nodes = Nodes.allocate(len(batch_slot_B), depth * width + 5, device=DEVICE)
    for tensor in nodes:
        tensor.fill_(-77)
    table = CalibrationTable.of(
        torch.from_numpy(rng.uniform(0.1, 1, 448).astype(np.float32)).to(DEVICE)
    )
    match_BJW = workspace(len(batch_slot_B), width, batch_slots)
    match_BJW.fill_(1 << 62)
    history_nodes(
        torch.from_numpy(batch_slot_B).to(DEVICE),
        batch_slots,
        nodes,
        table,
        match_BJW,
        depth=depth,
        width=width,
    )
    found, host = numpy_of(nodes), BatchSlots(*numpy_of(batch_slots))
    total = 0
    for b, limit in enumerate(draft_limits(host, batch_slot_B, depth)):
        trie = (
            trie_of(host, int(batch_slot_B[b]), limit, width, table.acceptance_Z.cpu().numpy())
            if limit
            else {}
        )
        total += len(trie)
        for c in range(found.acceptance_BC.shape[1]):
            if c not in trie:
                assert found.acceptance_BC[b, c] == -1, f"acceptance_BC[{b}, {c}]"
                continue
            for name, value in trie[c].items():
                at = getattr(found, f"{name}_BC")[b, c]
                assert abs(at - value) <= (1e-6 if name == "acceptance" else 0), (
                    f"{name}_BC[{b}, {c}]"
                )
            assert (
                c < width or found.acceptance_BC[b, c] <= found.acceptance_BC[b, trie[c]["parent"]]
            )
    return total


def grouped_batch_slots(seed: int, batch_slots: int, tokens: int, vocabulary: int) -> BatchSlots:
    rng = np.random.default_rng(seed)
    made = make_batch_slots(rng, batch_slots, tokens, vocabulary=vocabulary)
    made.first_Q[:-1] = torch.from_numpy(rng.integers(0, 9, batch_slots - 1).astype(np.int32))
    made.group_Q[:-1] = torch.from_numpy(rng.integers(-1, 2, batch_slots - 1).astype(np.int32))
    return made


@pytest.mark.parametrize(
    ("depth", "width", "vocabulary"), [(4, 4, 3), (1, 1, 5), (6, 3, 2), (9, 8, 8)]
)
def test_history_drafts_equal_their_twin(depth: int, width: int, vocabulary: int) -> None:
    found = 0
    for seed in range(3):
        batch_slots = grouped_batch_slots(seed, 6, 90, vocabulary)
        found += draft_and_check(
            batch_slots, np.array([0, 3, batch_slots.idle, 2], np.int32), depth, width, seed
        )
    assert found, "nothing ever matches"


def test_finished_sibling_is_drafted_from() -> None:
    batch_slots = grouped_batch_slots(0, 4, 60, 1000)
    batch_slots.group_Q[:] = torch.tensor([5, 5, -1, -1])
    batch_slots.token_QT[0, 10:13] = batch_slots.token_QT[1, 20:23]
    for name, value in (
        ("length", 13),
        ("limit", 40),
        ("capacity", 48),
        ("done", 0),
        ("drafters", 1),
        ("max_depth", 64),
    ):
        getattr(batch_slots, f"{name}_Q")[0] = value
    batch_slots.done_Q[1], batch_slots.length_Q[1] = 1, 30
    assert draft_and_check(batch_slots, np.array([0], np.int32), 4, 2, 0) == 4


def test_a_request_without_a_group_sees_only_its_own_text() -> None:
    batch_slots = grouped_batch_slots(0, 4, 60, 1000)
    batch_slots.group_Q[:] = -1
    batch_slots.token_QT[0, 10:13] = batch_slots.token_QT[1, 20:23]
    batch_slots.length_Q[0], batch_slots.length_Q[1] = 13, 30
    assert draft_and_check(batch_slots, np.array([0], np.int32), 4, 2, 0) == 0


def test_large_group_is_drafted_from_a_bounded_set_of_texts() -> None:
    batch_slots = grouped_batch_slots(3, MEMBERS + 6, 40, 30)
    batch_slots.group_Q[:-1] = 3
    batch_slots.done_Q[MEMBERS + 2], batch_slots.drafters_Q[MEMBERS + 2] = 0, 1
    batch_slots.length_Q[:], batch_slots.limit_Q[:], batch_slots.capacity_Q[:] = 30, 40, 40
    batch_slots.max_depth_Q[:] = 9
    for q in (4, MEMBERS + 3):
        batch_slots.token_QT[q, 20:23] = batch_slots.token_QT[MEMBERS + 2, 27:30]
    assert draft_and_check(batch_slots, np.array([MEMBERS + 2], np.int32), 2, 4, 0) >= 2


def test_blocks_of_a_long_text_are_all_searched() -> None:
    batch_slots = grouped_batch_slots(1, 3, 2600, 1 << 20)
    for name, value in (
        ("length", 2500),
        ("limit", 2600),
        ("capacity", 2512),
        ("done", 0),
        ("drafters", 1),
        ("max_depth", 64),
        ("group", 2),
    ):
        getattr(batch_slots, f"{name}_Q")[:2] = value
    own = batch_slots.token_QT[0, 2494:2500].clone()
    for batch_slot, at in ((0, 1021), (0, 2042), (1, 5), (1, 2047)):
        batch_slots.token_QT[batch_slot, at : at + 6] = own  # across the blocks' edges as well
    assert draft_and_check(batch_slots, np.array([0], np.int32), 3, 4, 0) == 12


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_drafts_of_large_groups_equal_their_twin() -> None:
    batch_slots = grouped_batch_slots(2, 30, 1500, 40)
    assert draft_and_check(batch_slots, np.array([*range(12), batch_slots.idle], np.int32), 8, 8, 2)
