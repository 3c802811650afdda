"""Whole cycles of random trees: everything up to the samples, and the comparison of what `accept`
writes with the engine's own walk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.kernels.triton_tests import DEVICE  # isort: skip
from tests.kernels.tree_twins import (
    EDGES,
    children,
    kv_slot_of,
    make_batch_slots,
    numpy_of,
    poison,
    table,
)
from tlt_kernels.gpu.accept import accept, fields, parse
from tlt_kernels.gpu.growth import columns, grow, roots
from tlt_kernels.gpu.rows import layout_prefill, select_rows
from tlt_kernels.gpu.tensors import (
    BatchSlots,
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
OWN_COLUMNS = 2  # nodes in later columns count as branches


class Cycle:
    """Everything of one cycle up to the samples: B requests (the last is padding) and two chunks,
    the second unfinished.
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
        self.rng = rng
        self.decode_rows = decode_rows
        self.depth = depth
        self.chunks = 2 if chunks else 0
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
            made, edges = (self.draft, self.nodes, calibration), torch.from_numpy(EDGES).to(DEVICE)
            sizes = {"requests": requests, "depth": depth, "width": width}
            slots = {"first_kv_slot": 7000, "trash": TRASH, "idle": batch_slots.idle}
            grow(level, token_ML, z_ML, *made, edges, **sizes, **slots)
        prefill = 40 if chunks else 0
        self.rows = RowTable.allocate(decode_rows + prefill, depth, device=DEVICE)
        self.trees = Trees.allocate(requests, self.chunks, decode_rows, device=DEVICE)
        sizes = (requests, self.chunks, decode_rows, prefill, depth)
        self.kept = KeptRows.allocate(*sizes, device=DEVICE)
        laid_out = self.rows, self.trees, self.kept
        for group in laid_out:
            poison(group)
        room = {"scratch_start": SCRATCH, "own_columns": OWN_COLUMNS}
        bounds = {"decode_rows": decode_rows, "trash": TRASH}
        select_rows(self.batch_slot_B, batch_slots, self.nodes, *laid_out, **bounds, **room)
        if chunks:
            length_W = batch_slots.length_Q[self.batch_slot_W.long()].cpu().numpy()
            start_W = np.maximum(length_W - 17, 0).astype(np.int32)
            count_W = (length_W - start_W - (0, 1)).astype(np.int32)
            read_W = (torch.from_numpy(each).to(DEVICE) for each in (start_W, count_W))
            self.prefill = PrefillChunks(self.batch_slot_W, *read_W)
            bounds |= {"requests": requests, "prefill_rows": prefill}
            layout_prefill(self.prefill, batch_slots, *laid_out, **bounds)
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
        shape = len(self.batch_slot_B) + self.chunks, fields(self.depth)
        self.outcome_EF = torch.full(shape, -77, dtype=torch.int32, device=DEVICE)
        sampled = (torch.from_numpy(each).to(DEVICE) for each in (self.token_S, self.logprob_S))
        work = self.batch_slot_B, self.prefill if self.chunks else None, Samples(*sampled)
        made = self.batch_slots, self.rows, self.trees, self.kept, self.outcome_EF
        accept(*work, *made, decode_rows=self.decode_rows)
        return parse(self.outcome_EF.cpu().numpy())


def check_cycle(cycle: Cycle) -> tuple[int, int]:
    """Compare everything that `accept` writes; return (drafts accepted, sequences ended)."""
    before, rows, trees = numpy_of(cycle.batch_slots), numpy_of(cycle.rows), numpy_of(cycle.trees)
    before = BatchSlots(*before)
    untouched_R = cycle.kept.page_R.cpu().numpy().copy()
    outcome = cycle.accept()
    after, kept = BatchSlots(*numpy_of(cycle.batch_slots)), numpy_of(cycle.kept)
    requests, rows_V = len(cycle.batch_slot_B), cycle.decode_rows
    entries = [*enumerate([*cycle.batch_slot_B.tolist(), *cycle.batch_slot_W.tolist()])]
    expected = BatchSlots(*(a.copy() for a in before))
    page_R = untouched_R.copy()
    total_accepted = ended = 0
    columns = cycle.nodes.acceptance_BC.shape[1]
    for e, q in entries:
        root, count = int(trees.root_E[e]), int(trees.count_E[e])
        if e < requests and count:
            found = walk(
                np.array([root], np.int32),
                np.array([count], np.int32),
                rows.parent_R[:rows_V],
                rows.token_R[:rows_V].astype(np.int64),
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
        assert outcome.accepted_E[e] == max(len(tokens) - 1, 0), f"entry {e}"
        assert outcome.verified_E[e] == max(count - 1, 0), f"entry {e}"
        own_I = [trees.node_V[row] % columns < OWN_COLUMNS for row in range(root + 1, root + count)]
        own_path = [trees.node_V[row] % columns < OWN_COLUMNS for row in path[1:]]
        assert outcome.own_verified_E[e] == sum(own_I), f"own_verified_E[{e}]"
        assert outcome.own_accepted_E[e] == sum(own_path), f"own_accepted_E[{e}]"
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
        assert kept.hint_row_E[e] == hint_row, f"hint of entry {e}"
        assert hint_row < 0 or kept.hint_batch_slot_E[e] == q, f"hint of entry {e}"
        if e >= requests:
            continue
        moved = path[1:keep]
        total_accepted += len(moved)
        assert kept.count_B[e] == len(moved), f"count_B[{e}]"
        source, target = (
            each[e, : len(moved)].tolist() for each in (kept.source_BD, kept.target_BD)
        )
        assert source == [SCRATCH + r for r in moved], f"source_BD[{e}]"
        slots = [kv_slot_of(before, q, length + i) for i in range(len(moved))]
        assert target == slots, f"target_BD[{e}]"
        for i, row in enumerate(path[:keep]):
            if (length - 1 + i) % 16 == 15:
                page_R[row] = kv_slot_of(before, q, length - 1 + i) // 16
        for row in range(root, root + count):
            assert kept.on_path_V[row] == (row in path and not broken), f"on_path_V[{row}]"
    for name, array in expected._asdict().items():
        np.testing.assert_array_equal(getattr(after, name), array, err_msg=name)
    np.testing.assert_array_equal(kept.page_R, page_R, err_msg="page_R")
    return total_accepted, ended
