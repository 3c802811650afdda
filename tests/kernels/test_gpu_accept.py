"""The walk on the device is the engine's own: whole cycles of random trees against
`tlt_server.speculation.accept`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, gpu  # isort: skip
from tests.kernels.tree_twins import (
    EDGES,
    children,
    kv_slot_of,
    make_batch_slots,
    numpy_of,
    poison,
    table,
)
from tlt_kernels.cpu.counts import tally
from tlt_kernels.gpu.accept import accept, fields, parse
from tlt_kernels.gpu.calibration import calibrate
from tlt_kernels.gpu.growth import columns, grow, roots
from tlt_kernels.gpu.kept import commit_kv, store_hints
from tlt_kernels.gpu.rows import layout_prefill, select_rows
from tlt_kernels.gpu.tensors import (
    BatchSlots,
    CalibrationTable,
    Draft,
    KeptRows,
    Nodes,
    PrefillChunks,
    RowTable,
    Samples,
    Trees,
)
from tlt_server.speculation.accept import accept as walk

TRASH, SCRATCH = 9999, 5000


class Cycle:
    """Everything of one cycle up to the samples: B requests (the last is padding), two chunks, the
    second unfinished.
    """

    def __init__(
        self,
        seed: int,
        *,
        requests: int,
        depth: int,
        width: int,
        decode_rows: int,
        chunks: bool = True,
        luck: float = 0.7,
        broken: float = 0.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.decode_rows, self.depth, self.chunks = (
            rng,
            decode_rows,
            depth,
            2 if chunks else 0,
        )
        self.batch_slots = batch_slots = make_batch_slots(rng, requests + 5, 90)
        order = rng.permutation(requests + 4)
        batch_slot_B = np.append(order[: requests - 1], batch_slots.idle).astype(np.int32)
        batch_slot_W = order[requests : requests + self.chunks].astype(np.int32)
        for q in batch_slot_W:
            batch_slots.done_Q[int(q)] = 0
        batch_slots.stop_QK[:, 1] = torch.from_numpy(
            rng.integers(0, 60, len(batch_slots.length_Q)).astype(np.int32)
        )
        self.batch_slot_B, self.batch_slot_W = (
            torch.from_numpy(a).to(DEVICE) for a in (batch_slot_B, batch_slot_W)
        )
        columns_ = columns(depth, width) + 2
        self.nodes = Nodes.allocate(requests, columns_, device=DEVICE)
        self.draft = Draft.allocate(requests, depth, width, device=DEVICE)
        calibration = table(rng)
        roots(self.batch_slot_B, batch_slots, self.draft, self.nodes, depth=depth, trash=TRASH)
        for level in range(depth):
            token_ML, z_ML = children(rng, Draft.level(requests, width, level)[1], width)
            grow(
                level,
                token_ML,
                z_ML,
                self.draft,
                self.nodes,
                calibration,
                torch.from_numpy(EDGES).to(DEVICE),
                requests=requests,
                depth=depth,
                width=width,
                first_kv_slot=7000,
                trash=TRASH,
                idle=batch_slots.idle,
            )
        prefill = 40 if chunks else 0
        self.rows = RowTable.allocate(decode_rows + prefill, depth, device=DEVICE)
        self.trees = Trees.allocate(requests, self.chunks, decode_rows, device=DEVICE)
        self.kept = KeptRows.allocate(
            requests, self.chunks, decode_rows, prefill, depth, device=DEVICE
        )
        for group in (self.rows, self.trees, self.kept):
            poison(group)
        select_rows(
            self.batch_slot_B,
            batch_slots,
            self.nodes,
            self.rows,
            self.trees,
            self.kept,
            decode_rows=decode_rows,
            scratch_start=SCRATCH,
            trash=TRASH,
        )
        if chunks:
            length_W = batch_slots.length_Q[self.batch_slot_W.long()].cpu().numpy()
            start_W = np.maximum(length_W - 17, 0).astype(np.int32)
            count_W = (length_W - start_W - (0, 1)).astype(np.int32)
            self.prefill = PrefillChunks(
                self.batch_slot_W,
                torch.from_numpy(start_W).to(DEVICE),
                torch.from_numpy(count_W).to(DEVICE),
            )
            layout_prefill(
                self.prefill,
                batch_slots,
                self.rows,
                self.trees,
                self.kept,
                requests=requests,
                decode_rows=decode_rows,
                prefill_rows=prefill,
                trash=TRASH,
            )
        rows = numpy_of(self.rows)
        samples = decode_rows + self.chunks
        self.token_S = rng.integers(0, 60, samples, dtype=np.int32)
        for r in range(decode_rows):  # often a child's own token
            mine = np.flatnonzero(rows.parent_R[:decode_rows] == r)
            if len(mine) and rng.random() < luck:
                self.token_S[r] = rows.token_R[rng.choice(mine)]
        self.logprob_S = -rng.exponential(1.0, samples).astype(np.float32)
        self.logprob_S[rng.random(samples) < broken] = np.nan

    def accept(self) -> Any:
        self.outcome_EF = torch.full(
            (len(self.batch_slot_B) + self.chunks, fields(self.depth)),
            -77,
            dtype=torch.int32,
            device=DEVICE,
        )
        accept(
            self.batch_slot_B,
            self.prefill if self.chunks else None,
            Samples(
                torch.from_numpy(self.token_S).to(DEVICE),
                torch.from_numpy(self.logprob_S).to(DEVICE),
            ),
            self.batch_slots,
            self.rows,
            self.trees,
            self.kept,
            self.outcome_EF,
            decode_rows=self.decode_rows,
        )
        return parse(self.outcome_EF.cpu().numpy())


def check_cycle(cycle: Cycle) -> tuple[int, int]:
    """Compare everything that `accept` writes; returns (drafts accepted, sequences ended)."""
    before, rows, trees = numpy_of(cycle.batch_slots), numpy_of(cycle.rows), numpy_of(cycle.trees)
    before = BatchSlots(*before)
    untouched_R = cycle.kept.page_R.cpu().numpy().copy()
    outcome = cycle.accept()
    after, kept = BatchSlots(*numpy_of(cycle.batch_slots)), numpy_of(cycle.kept)
    requests, rows_V = len(cycle.batch_slot_B), cycle.decode_rows
    entries = [
        (e, int(q))
        for e, q in enumerate([*cycle.batch_slot_B.tolist(), *cycle.batch_slot_W.tolist()])
    ]
    expected = BatchSlots(*(a.copy() for a in before))
    page_R = untouched_R.copy()
    total_accepted = ended = 0
    for e, q in entries:
        root, count = int(trees.root_E[e]), int(trees.count_E[e])
        if e < requests and count:
            found = walk(
                np.array([root], np.int32),
                np.array([count], np.int32),
                rows.parent_R[:rows_V],
                rows.token_R[:rows_V],
                cycle.token_S[:rows_V],
            )
            path, tokens = [root, *found.row_A.tolist()], found.token_E.tolist()
            logprobs = cycle.logprob_S[path].tolist()
        elif count:
            path, tokens = [root], [int(cycle.token_S[rows_V + e - requests])]
            logprobs = [float(cycle.logprob_S[rows_V + e - requests])]
        else:
            path, tokens, logprobs = [], [], []
        length, stops = int(before.length_Q[q]), [s for s in before.stop_QK[q].tolist() if s >= 0]
        room = int(before.limit_Q[q]) - length
        stopped = next((i for i, token in enumerate(tokens[:room]) if token in stops), None)
        keep = stopped + 1 if stopped is not None else min(room, len(tokens))
        done = count > 0 and (stopped is not None or keep == room)
        broken = bool(np.isnan(logprobs[:keep]).any())
        if broken:
            keep, done = 0, True
        assert outcome.count_E[e] == keep, f"count_E[{e}]"
        assert outcome.accepted_E[e] == max(len(tokens) - 1, 0) and outcome.verified_E[e] == max(
            count - 1, 0
        ), f"entry {e}"
        assert (outcome.done_E[e], outcome.broken_E[e]) == (done, broken), f"flags of entry {e}"
        assert outcome.token_EA[e, :keep].tolist() == tokens[:keep], f"token_EA[{e}]"
        assert outcome.logprob_EA[e, :keep].tolist() == logprobs[:keep], f"logprob_EA[{e}]"
        expected.token_QT[q, length : length + keep] = tokens[:keep]
        expected.length_Q[q] += keep
        expected.done_Q[q] |= done
        ended += done
        hint_row = path[keep - 1] if keep else -1
        if e >= requests and not broken:
            hint_row = root
        assert kept.hint_row_E[e] == hint_row and (
            hint_row < 0 or kept.hint_batch_slot_E[e] == q
        ), f"hint of entry {e}"
        if e >= requests:
            continue
        moved = path[1:keep]
        total_accepted += len(moved)
        assert kept.count_B[e] == len(moved), f"count_B[{e}]"
        assert kept.source_BD[e, : len(moved)].tolist() == [SCRATCH + r for r in moved], (
            f"source_BD[{e}]"
        )
        assert kept.target_BD[e, : len(moved)].tolist() == [
            kv_slot_of(before, q, length + i) for i in range(len(moved))
        ], f"target_BD[{e}]"
        for i, row in enumerate(path[:keep]):
            if (length - 1 + i) % 16 == 15:
                page_R[row] = kv_slot_of(before, q, length - 1 + i) // 16
        for row in range(root, root + count):
            assert kept.on_path_V[row] == (row in path), f"on_path_V[{row}]"
    for name, array in expected._asdict().items():
        np.testing.assert_array_equal(getattr(after, name), array, err_msg=name)
    np.testing.assert_array_equal(kept.page_R, page_R, err_msg="page_R")
    return total_accepted, ended


@pytest.mark.parametrize(
    ("requests", "depth", "width", "decode_rows"),
    [(2, 3, 2, 9), (5, 3, 2, 24), (6, 4, 1, 20), (4, 1, 3, 4)],
)
def test_whole_cycles_emit_what_the_engines_walk_emits(
    requests: int, depth: int, width: int, decode_rows: int
) -> None:
    accepted = ended = 0
    for seed in range(3):
        found = check_cycle(
            Cycle(seed, requests=requests, depth=depth, width=width, decode_rows=decode_rows)
        )
        accepted, ended = accepted + found[0], ended + found[1]
    assert accepted or decode_rows == requests, "the test never accepts a draft"
    assert ended, "the test never ends a sequence"


def test_without_prefill_chunks() -> None:
    check_cycle(Cycle(1, requests=3, depth=3, width=2, decode_rows=12, chunks=False))


def test_a_sequence_that_wants_no_tokens_ends_with_none() -> None:
    cycle = Cycle(0, requests=3, depth=2, width=2, decode_rows=8)
    batch_slot = int(cycle.batch_slot_W[0])
    cycle.batch_slots.limit_Q[batch_slot] = cycle.batch_slots.length_Q[batch_slot]
    check_cycle(cycle)
    assert cycle.batch_slots.done_Q[batch_slot] and cycle.kept.hint_row_E[3] >= 0


def test_a_broken_logprob_ends_the_sequence_with_nothing_emitted() -> None:
    def ended(broken: float) -> int:
        return sum(
            check_cycle(Cycle(seed, requests=5, depth=3, width=2, decode_rows=16, broken=broken))[1]
            for seed in range(2)
        )

    assert ended(broken=0.3) > ended(broken=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_accepted_kv_moves_to_its_pages_in_every_layer(dtype: torch.dtype) -> None:
    cycle = Cycle(3, requests=6, depth=4, width=2, decode_rows=30)
    cycle.accept()
    kept = numpy_of(cycle.kept)
    assert kept.count_B.sum() > 0
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(3, TRASH + 1, 3, 8, generator=generator).to(dtype).to(DEVICE) for _ in range(2)
    )
    expected_k, expected_v = k.clone(), v.clone()
    for b, count in enumerate(kept.count_B):
        for source, target in zip(
            kept.source_BD[b, :count].tolist(), kept.target_BD[b, :count].tolist(), strict=True
        ):
            expected_k[:, target], expected_v[:, target] = k[:, source], v[:, source]
    commit_kv(cycle.kept, k, v)
    assert torch.equal(k, expected_k) and torch.equal(v, expected_v)


def test_features_of_last_positions_and_of_page_ends_are_remembered() -> None:
    cycle = Cycle(4, requests=6, depth=4, width=2, decode_rows=30)
    cycle.accept()
    kept = numpy_of(cycle.kept)
    g_RH = torch.randn(len(kept.page_R), 8, device=DEVICE)
    page_hint_PH = torch.full((200, 8), 5.0, device=DEVICE)
    expected_batch_slots, expected_pages = cycle.batch_slots.hint_QH.clone(), page_hint_PH.clone()
    for row, page in enumerate(kept.page_R.tolist()):
        if page >= 0:
            expected_pages[page] = g_RH[row]
    for row, batch_slot in zip(
        kept.hint_row_E.tolist(), kept.hint_batch_slot_E.tolist(), strict=True
    ):
        if row >= 0:
            expected_batch_slots[batch_slot] = g_RH[row]
    assert (kept.page_R >= 0).any()
    store_hints(cycle.kept, g_RH, cycle.batch_slots, page_hint_PH)
    assert torch.equal(cycle.batch_slots.hint_QH, expected_batch_slots) and torch.equal(
        page_hint_PH, expected_pages
    )


def test_the_table_learns_as_the_cpu_engines_does() -> None:
    rng = np.random.default_rng(0)
    prior_Z = rng.uniform(0, 1, 256).astype(np.float32)
    learned = CalibrationTable.of(torch.from_numpy(prior_Z).to(DEVICE))
    hits_Z, trials_Z, survival_Z = np.zeros(256), np.zeros(256), prior_Z.copy()
    counted = 0
    for seed in range(3):
        cycle = Cycle(seed, requests=5, depth=3, width=2, decode_rows=26)
        cycle.accept()
        calibrate(cycle.trees, cycle.kept, cycle.nodes, cycle.rows, learned, decode_rows=26)
        node_V, on_path_V, parent_R = (
            t.cpu().numpy() for t in (cycle.trees.node_V, cycle.kept.on_path_V, cycle.rows.parent_R)
        )
        drafts = np.flatnonzero(node_V >= 0)
        index_of = {int(row): n for n, row in enumerate(drafts)}
        parents = np.array([index_of.get(int(parent_R[row]), -1) for row in drafts], np.int32)
        counted += tally(
            cycle.nodes.cell_BC.cpu().numpy().reshape(-1)[node_V[drafts]],
            parents,
            on_path_V[drafts].astype(np.int8),
            prior_Z,
            64.0,
            4096.0,
            hits_Z,
            trials_Z,
            survival_Z,
        )
    assert counted
    assert_close("trials_Z", learned.trials_Z, torch.from_numpy(trials_Z), 1e-6)
    assert_close("hits_Z", learned.hits_Z, torch.from_numpy(hits_Z), 1e-6)
    assert_close("survival_Z", learned.survival_Z, torch.from_numpy(survival_Z), 1e-6)


def test_counts_are_halved_at_their_limit() -> None:
    cycle = Cycle(2, requests=4, depth=3, width=2, decode_rows=20)
    cycle.accept()
    counts = CalibrationTable.of(torch.full((256,), 0.5, device=DEVICE))
    counts.trials_Z.fill_(100)
    counts.hits_Z.fill_(60)
    calibrate(cycle.trees, cycle.kept, cycle.nodes, cycle.rows, counts, decode_rows=20, limit=100)
    seen_Z = counts.trials_Z != 100
    assert (
        seen_Z.any()
        and (counts.trials_Z[seen_Z] >= 50).all()
        and (counts.trials_Z[seen_Z] < 60).all()
    )
    assert (counts.hits_Z[seen_Z] >= 30).all() and (counts.survival_Z[~seen_Z] == 0.5).all()
    assert ((counts.survival_Z[seen_Z] - 92 / 164).abs() < 0.02).all(), (
        "prior 32 of 64, then 60 of 100 and a few more"
    )


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_captured_cycle_replays_what_launches_gave() -> None:
    cycle = Cycle(3, requests=6, depth=4, width=2, decode_rows=30, chunks=False)
    before = [t.clone() for t in cycle.batch_slots]
    expected = cycle.accept()
    found_EF = torch.zeros(6, fields(cycle.depth), dtype=torch.int32, device=DEVICE)
    samples = Samples(
        torch.from_numpy(cycle.token_S).to(DEVICE), torch.from_numpy(cycle.logprob_S).to(DEVICE)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_rows(
            cycle.batch_slot_B,
            cycle.batch_slots,
            cycle.nodes,
            cycle.rows,
            cycle.trees,
            cycle.kept,
            decode_rows=30,
            scratch_start=SCRATCH,
            trash=TRASH,
        )
        accept(
            cycle.batch_slot_B,
            None,
            samples,
            cycle.batch_slots,
            cycle.rows,
            cycle.trees,
            cycle.kept,
            found_EF,
            decode_rows=30,
        )
    for _ in range(3):
        for tensor, saved in zip(cycle.batch_slots, before, strict=True):
            tensor.copy_(saved)
        for group in (cycle.rows, cycle.trees, cycle.kept):
            poison(group)
        graph.replay()
        found = parse(found_EF.cpu().numpy())
        for e, count in enumerate(expected.count_E):
            assert found.count_E[e] == count and found.done_E[e] == expected.done_E[e], f"entry {e}"
            assert found.token_EA[e, :count].tolist() == expected.token_EA[e, :count].tolist(), (
                f"token_EA[{e}]"
            )


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize(
    ("requests", "depth", "width", "decode_rows"), [(2, 8, 4, 64), (64, 6, 4, 256), (33, 8, 2, 512)]
)
def test_large_cycles_emit_what_the_engines_walk_emits(
    requests: int, depth: int, width: int, decode_rows: int
) -> None:
    for seed in range(3):
        check_cycle(
            Cycle(seed, requests=requests, depth=depth, width=width, decode_rows=decode_rows)
        )
