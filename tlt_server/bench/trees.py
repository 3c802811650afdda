"""`tlt bench trees`: the parts of a cycle other than matmuls and attention, per call inside a CUDA
graph: growing trees, choosing rows, walking paths, keeping KV.

Every walk takes the whole path, so that all of its KV moves; `history` looks through the texts of a
group of 8. Shapes of Qwen2.5-7B: 28 layers, 4 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from tlt_kernels.gpu.accept import accept, fields
from tlt_kernels.gpu.branches import MATCHES, columns, graft
from tlt_kernels.gpu.growth import grow, roots
from tlt_kernels.gpu.history import history_nodes, workspace
from tlt_kernels.gpu.kept import commit_kv
from tlt_kernels.gpu.rows import select_rows
from tlt_kernels.gpu.tensors import (
    PAGE_SIZE,
    BatchSlots,
    CalibrationTable,
    Draft,
    KeptRows,
    Nodes,
    RowTable,
    Samples,
    Trees,
)
from tlt_kernels.gpu.upload import UNLIMITED
from tlt_server.bench.micro import Call, Case, each, measure
from tlt_server.speculation.branches import FLOOR, LEFTS, prior
from tlt_server.speculation.survival import CELLS

LAYERS, KV_HEADS, WIDTH = 28, 4, 128
VOCABULARY, GROUP, CALLS = 512, 8, 20
EDGES = tuple(0.1 * 1.4**i for i in range(15))


class TreeCase(NamedTuple):
    requests: int
    depth: int
    width: int
    rows: int  # to verify, of all requests
    context: int = 640


CASES = (
    TreeCase(1, 7, 4, 32),
    TreeCase(1, 7, 4, 32, 16_000),
    TreeCase(8, 7, 1, 64),
    TreeCase(32, 7, 1, 256),
    TreeCase(64, 3, 2, 256),
    TreeCase(256, 7, 1, 512, 2000),
)


def texts(case: TreeCase, device: str) -> BatchSlots:
    """Return batch slots whose texts have few distinct tokens, so that history has matches; every
    slot is at `context` and has room. Its pages take turns, as a call touches only the last ones.
    """
    longest = case.context + 4 * PAGE_SIZE * 64
    batch_slots = BatchSlots.allocate(case.requests + 1, longest, hidden=8, device=device)
    table_QP = batch_slots.page_table_QP
    used = case.depth // PAGE_SIZE + 2
    page_QU = torch.randperm(len(table_QP) * used, dtype=torch.int32, device=device).view(-1, used)
    live = slice(0, case.requests)
    batch_slots.token_QT[:] = torch.randint(
        VOCABULARY, batch_slots.token_QT.shape, dtype=torch.int32, device=device
    )
    table_QP[:] = page_QU[:, torch.arange(table_QP.shape[1], device=device) % used]
    batch_slots.length_Q[live], batch_slots.limit_Q[live], batch_slots.capacity_Q[live] = (
        case.context,
        longest,
        longest,
    )
    batch_slots.done_Q[live], batch_slots.drafters_Q[live] = 0, 1
    batch_slots.max_depth_Q[live] = batch_slots.max_rows_Q[live] = UNLIMITED
    batch_slots.group_Q[live] = (
        torch.arange(case.requests, dtype=torch.int32, device=device) // GROUP
    )
    return batch_slots


def calls(case: TreeCase, *, layers: int = LAYERS, device: str = "cuda") -> dict[str, Call]:
    """Name of a part -> what launches it once."""
    batch_slots, wide = texts(case, device), columns(case.depth, case.width)
    trash = (int(batch_slots.page_table_QP.max()) + 1) * PAGE_SIZE
    batch_slot_B = torch.arange(case.requests, dtype=torch.int32, device=device)
    draft, nodes = (
        Draft.allocate(case.requests, case.depth, case.width, device=device),
        Nodes.allocate(case.requests, wide, device=device),
    )
    calibration, edges = (
        CalibrationTable.of(torch.full((CELLS + len(prior()),), 0.9, device=device)),
        torch.tensor(EDGES, device=device),
    )
    rows, trees = (
        RowTable.allocate(case.rows, case.depth, device=device),
        Trees.allocate(case.requests, 0, case.rows, device=device),
    )
    kept = KeptRows.allocate(case.requests, 0, case.rows, 0, case.depth, device=device)
    given = [Draft.level(case.requests, case.width, level)[1] for level in range(case.depth)]
    token_ML = [
        torch.rand(count, VOCABULARY, device=device)
        .argsort(1)[:, : max(case.width, 2)]
        .int()
        .contiguous()
        for count in given
    ]
    z_ML = [
        torch.randn(tokens.shape, device=device).sort(1, descending=True).values.contiguous()
        for tokens in token_ML
    ]

    def grown() -> None:
        roots(batch_slot_B, batch_slots, draft, nodes, depth=case.depth, trash=trash)
        for level in range(case.depth):
            grow(
                level,
                token_ML[level],
                z_ML[level],
                draft,
                nodes,
                calibration,
                edges,
                requests=case.requests,
                depth=case.depth,
                width=case.width,
                first_kv_slot=trash,
                trash=trash,
                idle=batch_slots.idle,
            )

    def selected() -> None:
        select_rows(
            batch_slot_B,
            batch_slots,
            nodes,
            rows,
            trees,
            kept,
            decode_rows=case.rows,
            scratch_start=trash + 1,
            trash=trash,
        )

    grown()
    selected()
    samples = Samples(followed(rows, case.rows), torch.zeros(case.rows, device=device))
    outcome_EF = torch.zeros(case.requests, fields(case.depth), dtype=torch.int32, device=device)
    length_Q = batch_slots.length_Q.clone()

    def walked() -> None:
        batch_slots.length_Q.copy_(length_Q)  # a walk moves it
        accept(
            batch_slot_B,
            None,
            samples,
            batch_slots,
            rows,
            trees,
            kept,
            outcome_EF,
            decode_rows=case.rows,
        )

    walked()
    kv_slots = trash + 1 + case.rows
    k_LSKD, v_LSKD = (
        torch.empty(
            layers, kv_slots, KV_HEADS, WIDTH, dtype=torch.bfloat16, device=device
        ).normal_()
        for _ in range(2)
    )
    match_BJW = workspace(case.requests, case.width, batch_slots)
    found = Nodes.allocate(case.requests, max(wide, case.depth * case.width), device=device)
    history = partial(
        history_nodes,
        batch_slot_B,
        batch_slots,
        found,
        calibration,
        match_BJW,
        depth=case.depth,
        width=case.width,
    )
    branches = partial(
        graft,
        batch_slot_B,
        batch_slots,
        nodes,
        calibration,
        workspace(case.requests, MATCHES, batch_slots),
        depth=case.depth,
        width=case.width,
        drafters=1,
        first_cell=CELLS,
        lefts=LEFTS,
        floor=FLOOR,
    )
    return {
        "tree": grown,
        "rows": selected,
        "walk": walked,
        "KV": partial(commit_kv, kept, k_LSKD, v_LSKD),
        "history": history,
        "branches": branches,
    }


def followed(rows: RowTable, count: int) -> torch.Tensor:
    """Samples that agree with each row's first child."""
    parent_R, token_R = rows.parent_R[:count].tolist(), rows.token_R[:count].tolist()
    child = {
        parent: token
        for parent, token in reversed(list(zip(parent_R, token_R, strict=True)))
        if parent >= 0
    }
    return torch.tensor(
        [child.get(row, 0) for row in range(count)], dtype=torch.int32, device=rows.token_R.device
    )


def cases() -> Iterator[Case]:
    torch.manual_seed(0)
    for shape in CASES:
        yield Case(
            shape._asdict(),
            {f"{name}_us": each([call], CALLS) for name, call in calls(shape).items()},
        )


def run(args: argparse.Namespace) -> int:
    return measure(args, "trees", cases())
