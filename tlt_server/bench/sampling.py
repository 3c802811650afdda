"""`tlt bench sampling`: time of sampling, of edits of logits, of reports on samples, and of
choosing children on a GPU, over rotating logits (more than the cache holds).

"head" rows fall off as rank^-1.5, "even" rows are normal with a deviation of 2.5, so that a top_p
of 0.95 keeps thousands.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tlt_kernels.gpu.children import children
from tlt_kernels.gpu.edits import edit
from tlt_kernels.gpu.report import score
from tlt_kernels.gpu.sampling import sample
from tlt_kernels.gpu.tensors import BatchSlots, RowTable
from tlt_server.bench.micro import Case, each, measure, row_of

VOCABULARY, DRAFT_VOCABULARY = 152_064, 32_000
SEEN = 1000  # different tokens in the text of a penalised sequence
ROTATED_BYTES = 160 * 2**20
CALLS = 48
FILTERS: dict[str, dict[str, float]] = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "all": {"top_p": 0.9, "top_k": 100, "min_p": 0.01},
}


class SamplingBench:
    """The cases; a vocabulary of logits, and of those of a drafter."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        drafts: int = DRAFT_VOCABULARY,
        seen: int = SEEN,
        device: str = "cuda",
    ) -> None:
        self.vocabulary, self.drafts, self.seen, self.device = vocabulary, drafts, seen, device

    def head_rows(self, count: int, size: int) -> Tensor:
        ranks = torch.rand(count, size, device=self.device).argsort(dim=1) + 1
        noise = torch.randn(count, size, device=self.device)
        return -1.5 * ranks.float().log() + 0.2 * noise

    def even_rows(self, count: int, size: int) -> Tensor:
        return 2.5 * torch.randn(count, size, device=self.device)

    def index(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def row_table(self, count: int) -> RowTable:
        """Return row r of batch slot r, at position r + 7."""
        index_R = self.index(count)
        rows = RowTable.allocate(count, 1, device=self.device)
        return rows._replace(position_R=index_R + 7, batch_slot_R=index_R)

    def batch_slots(
        self, count: int, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> BatchSlots:
        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=self.device)

        return BatchSlots.allocate(count, 1, hidden=1, device=self.device)._replace(
            seed_Q=torch.randint(-(2**62), 2**62, (count,), device=self.device),
            temperature_Q=full(0.9),
            top_k_Q=full(top_k, torch.int32),
            top_p_Q=full(top_p),
            min_p_Q=full(min_p),
        )

    def case(
        self,
        name: str,
        call: Callable[[Tensor], object],
        rows: Callable[[int, int], Tensor],
        count: int,
        size: int,
    ) -> Case:
        """Return the case of a call on logits [count, size] of this kind."""
        rotated = max(2, min(CALLS, ROTATED_BYTES // (4 * count * size)))
        calls = [partial(call, rows(count, size)) for _ in range(rotated)]
        whole_turns = math.ceil(CALLS / rotated) * rotated
        return Case({"case": name}, {"us": each(calls, whole_turns)})

    def sample(self, name: str, count: int, filters: dict[str, float] | None = None) -> Case:
        rows = self.even_rows if name.endswith("even") else self.head_rows
        batch = self.index(count), self.row_table(count), self.batch_slots(count, **filters or {})

        def call(logits: Tensor) -> object:
            return sample(logits, *batch, filtered=filters is not None)

        return self.case(name, call, rows, count, self.vocabulary)

    def score(self, count: int, live: int, best: int) -> Case:
        """Return rows in all, of which the first `live` were asked about."""
        index, table, slots = self.index(count), self.row_table(count), self.batch_slots(count)
        row_S = torch.where(index < live, index, -1)

        def call(logits: Tensor) -> object:
            return score(logits, row_S, index, table, slots, filtered=False, best=best)

        name = f"score {live} of {count}, best {best}"
        return self.case(name, call, self.head_rows, count, self.vocabulary)

    def edit(self, count: int) -> Case:
        """Return rows of as many penalised sequences."""
        index, table = self.index(count), self.row_table(count)
        table = table._replace(base_R=table.position_R + 1)  # roots
        count_QV = torch.zeros(count, self.vocabulary, dtype=torch.int32, device=self.device)
        order = torch.rand(count, self.vocabulary, device=self.device).argsort(1)
        count_QV.scatter_(1, order[:, : self.seen], 2)
        penalised = self.batch_slots(count)._replace(
            repetition_Q=torch.full((count,), 1.05, device=self.device), count_QV=count_QV
        )

        def call(logits: Tensor) -> None:
            edit(logits, index, table, penalised)

        return self.case(f"edit {count}", call, self.head_rows, count, self.vocabulary)

    def children(self, count: int, width: int) -> Case:
        chosen = torch.randperm(self.vocabulary, device=self.device)[: self.drafts]
        target_ids = chosen.sort().values.int()
        table, slots = self.row_table(count), self.batch_slots(count)

        def call(logits: Tensor) -> object:
            return children(logits, target_ids, table, slots, width=width)

        name = f"children {count} x {width}"
        return self.case(name, call, self.even_rows, count, self.drafts)

    def cases(self) -> Iterator[Case]:
        for count in (1, 8, 64, 256):
            yield self.sample(f"sample {count}", count)
        for count, live, best in ((1, 1, 16), (64, 64, 0), (64, 64, 16), (256, 4, 16)):
            yield self.score(count, live, best)
        for count in (1, 64, 256):
            yield self.edit(count)
        for name, filters in FILTERS.items():
            for count in (1, 64):
                yield self.sample(f"sample {count} {name}, head", count, filters)
        for name, filters in FILTERS.items():
            yield self.sample(f"sample 64 {name}, even", 64, filters)
        for count, width in ((1, 2), (8, 2), (1, 8), (8, 8), (64, 8), (512, 8)):
            yield self.children(count, width)


def run(args: argparse.Namespace) -> int:
    return measure(args, "sampling", map(row_of, SamplingBench().cases()))
