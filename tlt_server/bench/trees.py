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
from torch import Tensor

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
from tlt_server.bench.micro import Call, Case, each, measure, row_of
from tlt_server.speculation.branches import FLOOR, LEFTS, prior
from tlt_server.speculation.calibration import CELLS

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
    slots = BatchSlots.allocate(case.requests + 1, longest, hidden=8, device=device)
    table_QP = slots.page_table_QP
    used = case.depth // PAGE_SIZE + 2
    page_QU = torch.randperm(len(table_QP) * used, dtype=torch.int32, device=device).view(-1, used)
    slots.token_QT.random_(VOCABULARY)
    table_QP[:] = page_QU[:, torch.arange(table_QP.shape[1], device=device) % used]
    live = slice(0, case.requests)
    slots.length_Q[live] = case.context
    slots.limit_Q[live] = slots.capacity_Q[live] = longest
    slots.done_Q[live], slots.drafters_Q[live] = 0, 1
    slots.max_depth_Q[live] = slots.max_rows_Q[live] = UNLIMITED
    order = torch.arange(case.requests, dtype=torch.int32, device=device)
    slots.group_Q[live] = order // GROUP
    return slots


class TreeBench:
    """The tensors of a case, on which each part of a cycle may run again and again."""

    def __init__(self, case: TreeCase, layers: int, device: str) -> None:
        self.case, self.device, requests, rows = case, device, case.requests, case.rows
        self.slots, self.columns = texts(case, device), columns(case.depth, case.width)
        self.trash = (int(self.slots.page_table_QP.max()) + 1) * PAGE_SIZE
        self.batch_slot_B = torch.arange(requests, dtype=torch.int32, device=device)
        self.draft = Draft.allocate(requests, case.depth, case.width, device=device)
        self.nodes = Nodes.allocate(requests, self.columns, device=device)
        self.edges = torch.tensor(EDGES, device=device)
        acceptance_K = torch.full((CELLS + len(prior()),), 0.9, device=device)
        self.calibration = CalibrationTable.of(acceptance_K)
        self.rows = RowTable.allocate(rows, case.depth, device=device)
        self.trees = Trees.allocate(requests, 0, rows, device=device)
        self.kept = KeptRows.allocate(requests, 0, rows, 0, case.depth, device=device)
        self.levels = [self._drafted(level) for level in range(case.depth)]
        self.outcome_EF = torch.zeros(
            requests, fields(case.depth), dtype=torch.int32, device=device
        )
        self.length_Q = self.slots.length_Q.clone()
        shape = layers, self.trash + 1 + rows, KV_HEADS, WIDTH
        self.k_LSKD, self.v_LSKD = (
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)
        )
        self.grow()
        self.select()
        self.samples = Samples(followed(self.rows, rows), torch.zeros(rows, device=device))
        self.walk()

    def _drafted(self, level: int) -> tuple[Tensor, Tensor]:
        """Return tokens and logits that a drafter gives at a level, the best first."""
        _, count = Draft.level(self.case.requests, self.case.width, level)
        order = torch.rand(count, VOCABULARY, device=self.device).argsort(1)
        tokens = order[:, : max(self.case.width, 2)].int().contiguous()
        z = torch.randn(tokens.shape, device=self.device).sort(1, descending=True).values
        return tokens, z.contiguous()

    def grow(self) -> None:
        case, batch = self.case, (self.batch_slot_B, self.slots)
        roots(*batch, self.draft, self.nodes, depth=case.depth, trash=self.trash)
        for level, drafted in enumerate(self.levels):
            grow(
                level,
                *drafted,
                self.draft,
                self.nodes,
                self.calibration,
                self.edges,
                requests=case.requests,
                depth=case.depth,
                width=case.width,
                first_kv_slot=self.trash,
                trash=self.trash,
                idle=self.slots.idle,
            )

    def select(self) -> None:
        select_rows(
            self.batch_slot_B,
            self.slots,
            self.nodes,
            self.rows,
            self.trees,
            self.kept,
            decode_rows=self.case.rows,
            scratch_start=self.trash + 1,
            trash=self.trash,
        )

    def walk(self) -> None:
        self.slots.length_Q.copy_(self.length_Q)  # a walk moves it
        table = self.rows, self.trees, self.kept, self.outcome_EF
        batch = self.batch_slot_B, None, self.samples, self.slots
        accept(*batch, *table, decode_rows=self.case.rows)

    def history(self) -> Call:
        case, width = self.case, max(self.columns, self.case.depth * self.case.width)
        nodes = Nodes.allocate(case.requests, width, device=self.device)
        room = workspace(case.requests, case.width, self.slots)
        batch = self.batch_slot_B, self.slots, nodes, self.calibration, room
        return partial(history_nodes, *batch, depth=case.depth, width=case.width)

    def branches(self) -> Call:
        case, room = self.case, workspace(self.case.requests, MATCHES, self.slots)
        batch = self.batch_slot_B, self.slots, self.nodes, self.calibration, room
        tables = partial(graft, drafters=1, first_cell=CELLS, lefts=LEFTS, floor=FLOOR)
        return partial(tables, *batch, depth=case.depth, width=case.width)


def calls(case: TreeCase, *, layers: int = LAYERS, device: str = "cuda") -> dict[str, Call]:
    """Return a function that launches a part once, by the part's name."""
    bench = TreeBench(case, layers, device)
    return {
        "tree": bench.grow,
        "rows": bench.select,
        "walk": bench.walk,
        "KV": partial(commit_kv, bench.kept, bench.k_LSKD, bench.v_LSKD),
        "history": bench.history(),
        "branches": bench.branches(),
    }


def followed(rows: RowTable, count: int) -> Tensor:
    """Samples that agree with each row's first child."""
    parent_R, token_R = rows.parent_R[:count].tolist(), rows.token_R[:count].tolist()
    child = dict(zip(reversed(parent_R), reversed(token_R), strict=True))
    tokens = [child.get(row, 0) for row in range(count)]
    return torch.tensor(tokens, dtype=torch.int32, device=rows.token_R.device)


def cases() -> Iterator[Case]:
    torch.manual_seed(0)
    for shape in CASES:
        timed = {f"{name}_us": each([call], CALLS) for name, call in calls(shape).items()}
        yield Case(shape._asdict(), timed)


def run(args: argparse.Namespace) -> int:
    return measure(args, "trees", map(row_of, cases()))
