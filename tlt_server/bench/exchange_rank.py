"""A rank of `tlt bench exchange`: `python -m tlt_server.bench.exchange_rank FOLDER RANK`. Rank 0
prints one line per section, a JSON list of rows. Both compute the same in the same order.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed

from tlt_kernels.gpu import exchange
from tlt_kernels.gpu.exchange import PeerWindows, exchange_add_rms_norm, gather
from tlt_kernels.gpu.gemm import partials
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_server.bench.graph_time import captured
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.engine.gpu.windows import GroupWindows

RANKS, HIDDEN, INTERMEDIATE, LAYERS, EPS = 2, 3584, 18944, 28, 1e-6
ROWS = (1, 8, 32, 64, 256)
MANY_ROWS = (*ROWS, 2048)
CALLS = 2 * LAYERS  # exchanges in a graph; even, so that rooms alternate across replays
MEETINGS = 1000
BLOCK_WORDS = 5 * 75  # 20 bytes for each of a rank's blocks of 1024 tokens, per row
WARMING, REPEATS = 2, 15
SLEEP_CYCLES = 400_000  # about 0.2 ms, in which a run is queued
WAIT_S = 60.0  # a rank that compiles is waited for

Row = dict[str, Any]


class BenchRank:
    def __init__(self, number: int, folder: Path) -> None:
        self.folder, self.number = folder, number
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        self.meeting = Meeting(folder, number, RANKS, WAIT_S)
        windows = GroupWindows(number, 2 * max(MANY_ROWS) * HIDDEN, self.device)
        grants = self.meeting.told("grants", windows.grant)
        self.peers: PeerWindows = windows.open(grants, timeout_s=WAIT_S)
        self.windows = windows  # keeps them mapped
        self.weight = torch.ones(HIDDEN, device=self.device, dtype=torch.bfloat16)
        self.meeting.told("windows")

    def times_us(self, name: str, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return medians. The GPUs begin each run together: launches are queued while both sleep,
        and a meeting ends just before the run.
        """
        self.meeting.told(name)
        times: dict[str, list[float]] = {which: [] for which in runs}
        for _ in range(WARMING + REPEATS):
            for which, run in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(SLEEP_CYCLES)
                exchange.meet(self.peers)
                begin.record()
                run()
                end.record()
                end.synchronize()
                times[which].append(1e3 * begin.elapsed_time(end))
        if failure := self.peers.failure():
            raise TimeoutError(f"{failure}, in {name!r}")
        return {which: statistics.median(each[WARMING:]) for which, each in times.items()}

    def normal(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device)


def signals(rank: BenchRank) -> Iterator[Row]:
    run = partial(exchange.meet, rank.peers, MEETINGS)
    run()
    us = rank.times_us("signals", {"it": run})["it"] / MEETINGS
    yield {"what": "signal", "us": round(us, 3)}


def many(call: Callable[[int], object], count: int = CALLS) -> Callable[[], None]:
    """Return the replay of a graph of calls, which get their number."""

    def run() -> None:
        for i in range(count):
            call(i)

    return captured(run)


def fused(rank: BenchRank) -> Iterator[Row]:
    for rows in MANY_ROWS:
        for parts in (1, 2):
            yield fused_of(rank, parts, rows)


def fused_of(rank: BenchRank, parts: int, rows: int) -> Row:
    """Time the exchange of some partial sums per rank, and the norm that adds as many on one GPU;
    say how many of its elements differ from the norm's.
    """
    shape = parts, rows, HIDDEN
    all_TPRH = torch.stack([rank.normal(*shape, seed=each) for each in range(RANKS)])
    part_LRH, mine = all_TPRH.flatten(0, 1), all_TPRH[rank.number]
    rooms = [rank.peers.room(turn)[: mine.numel()].view(shape).copy_(mine) for turn in range(2)]
    residuals = [torch.zeros(rows, HIDDEN, device=rank.device) for _ in range(4)]
    out = torch.empty(rows, HIDDEN, device=rank.device, dtype=torch.bfloat16)

    def exchanged(i: int) -> Tensor:
        return exchange_add_rms_norm(
            rank.peers, rooms[i % 2], residuals[i % 4], rank.weight, EPS, out_RH=out
        )

    def alone(i: int) -> Tensor:
        return add_rms_norm(part_LRH, residuals[i % 4], rank.weight, EPS)

    rank.meeting.told(f"rooms {shape}")
    found, expected = exchanged(0), alone(1)
    differ = int((found != expected).sum() + (residuals[0] != residuals[1]).sum())
    exchange.meet(rank.peers)  # the next exchange uses the same room
    us = rank.times_us(f"fused {shape}", {"exchange": many(exchanged), "norm": many(alone)})
    return {
        "what": "exchange_add_rms_norm",
        "rows": rows,
        "parts": parts,
        "us": round(us["exchange"] / CALLS, 2),
        "norm_us": round(us["norm"] / CALLS, 2),
        "differ": differ,
    }


def gathered(rank: BenchRank) -> Iterator[Row]:
    for rows in ROWS:
        yield gathered_of(rank, rows)


def gathered_of(rank: BenchRank, rows: int) -> Row:
    words = rows * BLOCK_WORDS
    mine = [rank.peers.room(turn)[:words].view(torch.int32) for turn in range(2)]
    out = torch.empty(RANKS, words, dtype=torch.int32, device=rank.device)
    run = many(lambda i: gather(rank.peers, mine[i % 2], out))
    us = rank.times_us(f"gathered {rows}", {"it": run})["it"]
    return {"what": "gather", "rows": rows, "words": words, "us": round(us / CALLS, 2)}


def halves(rank: BenchRank) -> Iterator[Row]:
    """Time a rank's half of the o and down projections: as one leaf, as two that go to memory,
    which is 112 programs instead of 56, and as two that a program adds.
    """
    yield from projections(rank, RANKS, ROWS, ((1, 1), (2, 2), (2, 1)))


def folds(rank: BenchRank) -> Iterator[Row]:
    """Time the o and down projections of one GPU, without and with a fold of two leaves."""
    yield from projections(rank, 1, (64, 256, 2048), ((2, 2), (4, 2)))


def projections(
    rank: BenchRank, ranks: int, all_rows: tuple[int, ...], cuts: tuple[tuple[int, int], ...]
) -> Iterator[Row]:
    """Time each number of leaves and of partial sums."""
    for name, inputs in (("o", HIDDEN // ranks), ("down", INTERMEDIATE // ranks)):
        weights = [
            rank.normal(HIDDEN, inputs, seed=i).to(torch.bfloat16) * 0.02 for i in range(LAYERS)
        ]
        for rows in all_rows:
            us = projection_us(rank, f"{name} of {ranks}", weights, rows, cuts)
            for (leaves, parts), time_us in zip(cuts, us, strict=True):
                yield {
                    "what": f"partials of {name}",
                    "ranks": ranks,
                    "rows": rows,
                    "leaves": leaves,
                    "parts": parts,
                    "us": round(time_us / LAYERS, 2),
                }


def projection_us(
    rank: BenchRank, name: str, weights: list[Tensor], rows: int, cuts: tuple[tuple[int, int], ...]
) -> list[float]:
    x = rank.normal(rows, weights[0].shape[1], seed=rows).to(torch.bfloat16)

    def run(leaves: int, parts: int, i: int) -> Tensor:
        return partials(x, weights[i], leaves=leaves, parts=parts)

    runs = {str(cut): many(partial(run, *cut), LAYERS) for cut in cuts}
    return [*rank.times_us(f"{name}, {rows} rows", runs).values()]


def nccl(rank: BenchRank) -> Iterator[Row]:
    """Time NCCL's all-gather of the partial sums and the norm that adds them."""
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{rank.folder}/nccl",
        rank=rank.number,
        world_size=RANKS,
        timeout=timedelta(seconds=WAIT_S),
        device_id=rank.device,
    )
    for rows in ROWS:
        yield nccl_of(rank, rows)


def nccl_of(rank: BenchRank, rows: int) -> Row:
    mine = rank.normal(1, rows, HIDDEN, seed=rank.number)
    part_TRH = torch.empty(RANKS, rows, HIDDEN, device=rank.device)
    residual = torch.zeros(rows, HIDDEN, device=rank.device)

    def run(i: int) -> Tensor:
        distributed.all_gather_into_tensor(part_TRH, mine)
        return add_rms_norm(part_TRH, residual, rank.weight, EPS)

    us = rank.times_us(f"nccl {rows}", {"it": many(run)})["it"]
    return {"what": "nccl all-gather, add_rms_norm", "rows": rows, "us": round(us / CALLS, 2)}


SECTIONS = (signals, fused, gathered, halves, folds, nccl)


def main(folder: Path, number: int) -> None:
    rank = BenchRank(number, folder)
    for section in SECTIONS:
        rows = list(section(rank))
        if number == 0:
            print(msgspec.json.encode(rows).decode(), flush=True)
    rank.meeting.told("end")
    os._exit(0)  # closing NCCL's communicator could wait for the other rank


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
