"""A rank of `tlt bench exchange`: `python -m tlt_server.bench.exchange_rank FOLDER RANK`. Rank 0
prints one line per section, a JSON list of rows. Both compute the same in the same order.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from tlt_client.channels.nccl import new_id
from tlt_kernels.gpu.exchange import PeerWindows, Way, WindowSizes, way_of
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_server.bench.device_time import counted, on_device
from tlt_server.bench.matmul_chain import Chain, Inputs, Widths, step
from tlt_server.bench.micro import captured
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.engine.exchange.gathered import GatheredPeers, rooms
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.engine.exchange.nccl import NcclGathering
from tlt_server.engine.exchange.windows import GroupWindows
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.sums import RankSums

RANKS, SHAPE, EPS = 2, SHAPES["qwen2.5-7b"], 1e-6
HIDDEN, LAYERS = SHAPE.hidden, SHAPE.layers
ROWS = (1, 8, 32, 64, 256)
MANY_ROWS = (*ROWS, 2048)
CALLS = 2 * LAYERS  # exchanges in a graph; even, so that rooms alternate across replays
MEETINGS = 1000
BLOCK_WORDS = 5 * 75  # 20 bytes for each of a rank's blocks of 1024 tokens, per row
LEAVES_OF_RANK = 2
WARMING, REPEATS = 2, 15
PROFILED = 20  # steps
SLEEP_CYCLES = 400_000  # about 0.2 ms, in which a run is queued
WAIT_S = 60.0  # a rank that compiles is waited for

Row = dict[str, Any]


class BenchRank:
    def __init__(self, number: int, folder: Path) -> None:
        self.folder, self.number = folder, number
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        self.meeting = Meeting(folder, number, RANKS, WAIT_S)
        most = max(MANY_ROWS) * HIDDEN
        landing = max(way.landed(RANKS) for way in Way) * most
        windows = GroupWindows(number, WindowSizes(2 * most, landing), self.device)
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
                self.peers.meet()
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
    run = partial(rank.peers.meet, MEETINGS)
    run()
    us = rank.times_us("signals", {"it": run})["it"] / MEETINGS
    yield {"what": "signal", "us": round(us, 3)}


def many(call: Callable[[int], object]) -> Callable[[], None]:
    """Return the replay of a graph of calls, each of which gets its number."""

    def run() -> None:
        for i in range(CALLS):
            call(i)

    return captured(run)


def fused(rank: BenchRank) -> Iterator[Row]:
    for parts, rows, way in itertools.product((1, 2), MANY_ROWS, Way):
        yield fused_of(rank, parts, rows, way)


def fused_of(rank: BenchRank, parts: int, rows: int, way: Way) -> Row:
    """Time the exchange of `parts` partial sums per rank, and the norm that adds as many on one
    GPU; count the elements in which they differ.
    """
    shape = parts, rows, HIDDEN
    all_TPRH = torch.stack([rank.normal(*shape, seed=each) for each in range(RANKS)])
    part_LRH, mine = all_TPRH.flatten(0, 1), all_TPRH[rank.number]
    rooms = [rank.peers.room(turn)[: mine.numel()].view(shape).copy_(mine) for turn in range(2)]
    residuals = [torch.zeros(rows, HIDDEN, device=rank.device) for _ in range(4)]
    out = torch.empty(rows, HIDDEN, device=rank.device, dtype=torch.bfloat16)

    def exchanged(i: int) -> Tensor:
        return rank.peers.add_rms_norm(
            rooms[i % 2], residuals[i % 4], rank.weight, EPS, out_RH=out, way=way
        )

    def alone(i: int) -> Tensor:
        return add_rms_norm(part_LRH, residuals[i % 4], rank.weight, EPS)

    rank.meeting.told(f"rooms {shape} {way}")
    found, expected = exchanged(0), alone(1)
    differ = int((found != expected).sum() + (residuals[0] != residuals[1]).sum())
    rank.peers.meet()  # the next exchange uses the same room
    chosen = way is way_of(RANKS, rows)
    us = rank.times_us(f"fused {shape} {way}", {"exchange": many(exchanged), "norm": many(alone)})
    return {
        "what": "exchange_add_rms_norm" if chosen else f"exchange_add_rms_norm by {way.value}",
        "way": way.value,
        "rows": rows,
        "parts": parts,
        "us": round(us["exchange"] / CALLS, 2),
        "norm_us": round(us["norm"] / CALLS, 2),
        "differ": differ,
    }


def gathered(rank: BenchRank) -> Iterator[Row]:
    for rows in ROWS:
        words = rows * BLOCK_WORDS
        rooms = [rank.peers.room(turn)[:words].view(torch.int32) for turn in range(2)]
        out = torch.empty(RANKS, words, dtype=torch.int32, device=rank.device)
        calls = [partial(rank.peers.gather, room, out) for room in rooms]
        run = many(lambda i, calls=calls: calls[i % 2]())  # type: ignore[misc]
        us = rank.times_us(f"gathered {rows}", {"it": run})["it"]
        yield {"what": "gather", "rows": rows, "words": words, "us": round(us / CALLS, 2)}


def nccl(rank: BenchRank) -> Iterator[Row]:
    """Time NCCL's all-gather of the partial sums and the norm that adds them."""
    id = rank.meeting.told("nccl", new_id() if rank.number == 0 else b"")[0]
    room_YX = rooms(max(ROWS) * HIDDEN, rank.device)
    library = NcclGathering(id, rank.number, RANKS, room_YX[0], lambda: None, WAIT_S)
    peers = GatheredPeers(rank.number, RANKS, room_YX, library)
    for rows in ROWS:
        yield nccl_of(rank, peers, rows)


def nccl_of(rank: BenchRank, peers: GatheredPeers, rows: int) -> Row:
    shape = 1, rows, HIDDEN
    all_TRH = torch.cat([rank.normal(*shape, seed=each) for each in range(RANKS)])
    part = [peers.room(i)[: rows * HIDDEN].view(shape) for i in range(2)]
    for one in part:
        one.copy_(all_TRH[rank.number : rank.number + 1])
    residual, whole = (torch.zeros(rows, HIDDEN, device=rank.device) for _ in range(2))
    out = torch.empty(rows, HIDDEN, device=rank.device, dtype=torch.bfloat16)

    def run(i: int) -> Tensor:
        return peers.add_rms_norm(part[i % 2], residual, rank.weight, EPS, out_RH=out)

    differ = int((run(0) != add_rms_norm(all_TRH, whole, rank.weight, EPS)).sum())
    us = rank.times_us(f"nccl {rows}", {"it": many(run)})["it"]
    what = "nccl all-gather, add_rms_norm"
    return {"what": what, "rows": rows, "us": round(us / CALLS, 2), "differ": differ}


def waits(rank: BenchRank) -> Iterator[Row]:
    """Profile all matmuls of a step and the exchanges between them on both GPUs. The GPU whose
    matmul ends later finds its peer's sums there and does not wait, so the shorter of two exchanges
    is its cost, and the rest of the longer one is a wait.
    """
    chain = Chain(Widths.of(SHAPE, RANKS))
    sums, matmuls = RankSums(rank.peers), StrictMatmuls(LEAVES_OF_RANK)
    for rows in ROWS:
        run = captured(partial(step, chain, Inputs(chain.widths, rows), matmuls, sums))
        rank.meeting.told(f"chain {rows}")
        run()
        torch.cuda.synchronize()
        with profiler(activities=[ProfilerActivity.CUDA]) as found:
            rank.meeting.told(f"profile {rows}")
            for _ in range(PROFILED):
                run()
            torch.cuda.synchronize()
        mine = [us for name, us in counted(on_device(found)) if name.endswith("add_rms_norm")]
        told = rank.meeting.told(f"profiled {rows}", msgspec.msgpack.encode(mine))
        both = [msgspec.msgpack.decode(each, type=list[float]) for each in told]
        cost_us = statistics.fmean(map(min, *both))
        each_us = [statistics.fmean(us) for us in both]
        yield {
            "what": "exchanges of a step",
            "rows": rows,
            "exchanges": len(mine) // PROFILED,
            "us": round(cost_us, 2),
            "waits_us": [round(us - cost_us, 2) for us in each_us],
        }


SECTIONS = (signals, fused, gathered, waits, nccl)


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
