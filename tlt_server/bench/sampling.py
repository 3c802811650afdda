"""`tlt bench sampling`: time of sampling, of edits of logits, of reports on samples, and of
choosing children on a GPU.

Every figure is microseconds per call, from graphs of many calls
over rotating logits (more than the cache holds), the median of replays. "head" rows fall off as
rank^-1.5, "even" rows are normal with a deviation of 2.5, so that a top_p of 0.95 keeps thousands.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch

from tlt_kernels.gpu.children import children
from tlt_kernels.gpu.edits import edit
from tlt_kernels.gpu.report import score
from tlt_kernels.gpu.sampling import sample
from tlt_kernels.gpu.tensors import BatchSlots, RowTable
from tlt_server.bench.graph_time import microseconds, require_gpu
from tlt_server.bench.record import finish

VOCABULARY, DRAFT_VOCABULARY = 152_064, 32_000
ROTATED_BYTES = 160 * 2**20
CALLS, REPLAYS = 48, 15


def time_us(calls: list[Callable[[], object]]) -> float:
    """Return microseconds per call of a graph that runs all calls in turn, `CALLS` or more."""
    rounds = math.ceil(CALLS / len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return microseconds(run, REPLAYS) / (rounds * len(calls))


def head_rows(count: int, size: int) -> torch.Tensor:
    ranks = torch.rand(count, size, device="cuda").argsort(dim=1) + 1
    return -1.5 * ranks.float().log() + 0.2 * torch.randn(count, size, device="cuda")


def even_rows(count: int, size: int) -> torch.Tensor:
    return 2.5 * torch.randn(count, size, device="cuda")


def batch_slots(count: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> BatchSlots:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device="cuda")

    return BatchSlots.allocate(count, 1, hidden=1)._replace(
        seed_Q=torch.randint(-(2**62), 2**62, (count,), device="cuda"),
        temperature_Q=full(0.9),
        top_k_Q=full(top_k, torch.int32),
        top_p_Q=full(top_p),
        min_p_Q=full(min_p),
    )


def row_table(count: int) -> RowTable:
    """Row r of batch slot r, at position r + 7."""
    index_R = torch.arange(count, dtype=torch.int32, device="cuda")
    return RowTable.allocate(count, 1)._replace(position_R=index_R + 7, batch_slot_R=index_R)


def buffers(count: int, size: int) -> int:
    return max(2, min(CALLS, ROTATED_BYTES // (4 * count * size)))


def sample_us(
    count: int, rows: Callable[[int, int], torch.Tensor], *, filtered: bool, **filters: float
) -> float:
    index = torch.arange(count, dtype=torch.int32, device="cuda")
    positions, table = row_table(count), batch_slots(count, **filters)  # type: ignore[arg-type]
    logits = [rows(count, VOCABULARY) for _ in range(buffers(count, VOCABULARY))]
    return time_us([partial(sample, x, index, positions, table, filtered=filtered) for x in logits])


def score_us(count: int, live: int, best: int) -> float:
    """Rows in all, of which the first `live` were asked about."""
    index = torch.arange(count, dtype=torch.int32, device="cuda")
    row_S, rows, table = torch.where(index < live, index, -1), row_table(count), batch_slots(count)
    logits = [head_rows(count, VOCABULARY) for _ in range(buffers(count, VOCABULARY))]
    return time_us(
        [partial(score, x, row_S, index, rows, table, filtered=False, best=best) for x in logits]
    )


def edit_us(count: int, seen: int) -> float:
    """Rows of as many penalised sequences, each with a text of `seen` different tokens."""
    index, rows = torch.arange(count, dtype=torch.int32, device="cuda"), row_table(count)
    rows = rows._replace(base_R=rows.position_R + 1)  # roots
    count_QV = torch.zeros(count, VOCABULARY, dtype=torch.int32, device="cuda")
    count_QV.scatter_(1, torch.rand(count, VOCABULARY, device="cuda").argsort(1)[:, :seen], 2)
    penalised = batch_slots(count)._replace(
        repetition_Q=torch.full((count,), 1.05, device="cuda"), count_QV=count_QV
    )
    logits = [head_rows(count, VOCABULARY) for _ in range(buffers(count, VOCABULARY))]
    return time_us([partial(edit, x, index, rows, penalised) for x in logits])


def children_us(count: int, width: int) -> float:
    target_ids = torch.randperm(VOCABULARY, device="cuda")[:DRAFT_VOCABULARY].sort().values.int()
    rows, table = row_table(count), batch_slots(count)
    logits = [even_rows(count, DRAFT_VOCABULARY) for _ in range(buffers(count, DRAFT_VOCABULARY))]
    return time_us([partial(children, x, target_ids, rows, table, width=width) for x in logits])


def run(args: argparse.Namespace) -> int:
    require_gpu()
    figures: dict[str, float] = {}
    for count in (1, 8, 64, 256):
        figures[f"sample {count}"] = sample_us(count, head_rows, filtered=False)
    for count, live, best in ((1, 1, 16), (64, 64, 0), (64, 64, 16), (256, 4, 16)):
        figures[f"score {live} of {count}, best {best}"] = score_us(count, live, best)
    for count in (1, 64, 256):
        figures[f"edit {count}"] = edit_us(count, 1000)
    kinds: dict[str, dict[str, float]] = {
        "top_p": {"top_p": 0.95},
        "top_k": {"top_k": 50},
        "all": {"top_p": 0.9, "top_k": 100, "min_p": 0.01},
    }
    for name, filters in kinds.items():
        for count in (1, 64):
            figures[f"sample {count} {name}, head"] = sample_us(
                count, head_rows, filtered=True, **filters
            )
    for name, filters in kinds.items():
        figures[f"sample 64 {name}, even"] = sample_us(64, even_rows, filtered=True, **filters)
    for count, width in ((1, 2), (8, 2), (1, 8), (8, 8), (64, 8), (512, 8)):
        figures[f"children {count} x {width}"] = children_us(count, width)
    for name, figure in figures.items():
        print(f"{name:32} {figure:8.2f} us")
    rows = [{"case": name, "us": round(figure, 2)} for name, figure in figures.items()]
    finish(args, {"bench": "sampling", "rows": rows}, on_gpu=True)
    return 0
