"""The walk on the device against the engine's own: whole cycles of random trees, compared with
`tlt_server.speculation.accept`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, gpu  # isort: skip
from tests.kernels.cycles import SCRATCH, TRASH, Cycle, check_cycle
from tests.kernels.tree_twins import numpy_of, poison
from tlt_kernels.cpu.counts import tally
from tlt_kernels.gpu.accept import accept, fields, parse
from tlt_kernels.gpu.calibration import calibrate
from tlt_kernels.gpu.kept import commit_kv, store_hints
from tlt_kernels.gpu.rows import select_rows
from tlt_kernels.gpu.tensors import CalibrationTable, Samples


@pytest.mark.parametrize(
    ("requests", "depth", "width", "decode_rows"),
    [(3, 3, 2, 9), (5, 3, 2, 24), (6, 4, 1, 20), (4, 1, 3, 4)],
)
def test_whole_cycles_emit_the_tokens_of_the_cpu_walk(
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


def test_cycle_without_prefill_chunks_matches_the_cpu_walk() -> None:
    check_cycle(Cycle(1, requests=3, depth=3, width=2, decode_rows=12, chunks=False))


def test_sequence_with_no_tokens_left_ends_without_a_token() -> None:
    cycle = Cycle(0, requests=3, depth=2, width=2, decode_rows=8)
    batch_slot = int(cycle.batch_slot_W[0])
    cycle.batch_slots.limit_Q[batch_slot] = cycle.batch_slots.length_Q[batch_slot]
    check_cycle(cycle)
    assert cycle.batch_slots.done_Q[batch_slot] and cycle.kept.hint_row_E[3] >= 0


def test_nan_logprob_ends_the_sequence_without_a_token() -> None:
    def ended(broken: float) -> int:
        return sum(
            check_cycle(Cycle(seed, requests=5, depth=3, width=2, decode_rows=16, broken=broken))[1]
            for seed in range(2)
        )

    assert ended(broken=0.3) > ended(broken=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_accepted_kv_moves_to_the_requests_pages_in_every_layer(dtype: torch.dtype) -> None:
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


def test_features_of_last_positions_and_page_ends_are_kept() -> None:
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
    assert torch.equal(cycle.batch_slots.hint_QH, expected_batch_slots)
    assert torch.equal(page_hint_PH, expected_pages)


def test_calibration_table_learns_like_the_cpu_table() -> None:
    rng = np.random.default_rng(0)
    prior_Z = rng.uniform(0, 1, 256).astype(np.float32)
    learned = CalibrationTable.of(torch.from_numpy(prior_Z).to(DEVICE))
    hits_Z, trials_Z, acceptance_Z = np.zeros(256), np.zeros(256), prior_Z.copy()
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
            acceptance_Z,
        )
    assert counted
    assert_close("trials_Z", learned.trials_Z, torch.from_numpy(trials_Z), 1e-6)
    assert_close("hits_Z", learned.hits_Z, torch.from_numpy(hits_Z), 1e-6)
    assert_close("acceptance_Z", learned.acceptance_Z, torch.from_numpy(acceptance_Z), 1e-6)


def test_calibration_counts_are_halved_at_their_limit() -> None:
    cycle = Cycle(2, requests=4, depth=3, width=2, decode_rows=20)
    cycle.accept()
    counts = CalibrationTable.of(torch.full((256,), 0.5, device=DEVICE))
    counts.trials_Z.fill_(100)
    counts.hits_Z.fill_(60)
    calibrate(cycle.trees, cycle.kept, cycle.nodes, cycle.rows, counts, decode_rows=20, limit=100)
    seen_Z = counts.trials_Z != 100
    assert seen_Z.any()
    assert (counts.trials_Z[seen_Z] >= 50).all()
    assert (counts.trials_Z[seen_Z] < 60).all()
    assert (counts.hits_Z[seen_Z] >= 30).all() and (counts.acceptance_Z[~seen_Z] == 0.5).all()
    assert ((counts.acceptance_Z[seen_Z] - 92 / 164).abs() < 0.02).all(), (
        "prior 32 of 64, then 60 of 100 and a few more"
    )


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_replayed_cycle_equals_the_launched_cycle() -> None:
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
def test_large_cycles_emit_the_tokens_of_the_cpu_walk(
    requests: int, depth: int, width: int, decode_rows: int
) -> None:
    for seed in range(3):
        check_cycle(
            Cycle(seed, requests=requests, depth=depth, width=width, decode_rows=decode_rows)
        )
