"""One of two ranks that exchange over and over, with delays, and compare each result with what one
rank computes that has all partial sums: `python -m tests.kernels.exchange_rank DEVICE EXCHANGES
FOLDER RANK`. It prints how many differ.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import triton.language as tl

from tests.kernels.triton_tests import DEVICE

# isort: split
from tests.engine.fast_interpreter import patched_once
from tlt_kernels.gpu import exchange
from tlt_kernels.gpu.exchange import PeerWindows, Way, WindowSizes, peer_windows, window_bytes
from tlt_kernels.gpu.exchange_kernels import PROGRAMS
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.engine.exchange.windows import GroupWindows

RANKS, PARTS, HIDDEN, EPS = 2, 2, 256, 1e-6
MOST = 4 if DEVICE == "cpu" else PROGRAMS.value  # the interpreter runs programs one by one
# (rows, way) of each exchange of sums. Where there are more rows than programs, the first ones add
# two rows. Of 1 row, one rank owns none.
CASES = (
    (3, Way.PULL),
    (MOST + 2, Way.PUSH),
    (1, Way.TWO_STEPS),
    (MOST // 2 + 1, Way.PULL),
    (MOST, Way.PUSH),
    (MOST + 2, Way.TWO_STEPS),
    (3, Way.PUSH),
)
ROUND = len(CASES) + 1  # exchanges of a round, or of a graph; the last one is a gather
ROWS = max(rows for rows, _ in CASES)
SIZES = WindowSizes(PARTS * ROWS * HIDDEN, max(way.landed(RANKS) for way in Way) * ROWS * HIDDEN)
WAIT_S = 60


class Rank:
    """A rank and its values; `turn_1` counts rounds on the device, and changes all values."""

    def __init__(self, peers: PeerWindows) -> None:
        self.peers, self.device = peers, peers.own.device
        generator = torch.Generator().manual_seed(0)
        shape = ROUND, RANKS, PARTS, ROWS, HIDDEN
        self.base = torch.randn(shape, generator=generator).to(self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.weight = torch.randn(HIDDEN, generator=generator).to(self.device, dtype)
        self.turn_1 = torch.zeros(1, device=self.device)
        self.differ = torch.zeros((), dtype=torch.int64, device=self.device)

    def round(self) -> None:
        self.turn_1.add_(0.37)
        for i, (rows, way) in enumerate(CASES):
            self.delay(i)
            self.one(i, rows, way)
        self.gathered()

    def delay(self, i: int) -> None:
        """Be late in other exchanges than the other rank."""
        if self.device.type == "cuda" and (i + self.peers.rank) % 3 == 0:
            torch.cuda._sleep(20_000)

    def one(self, i: int, rows: int, way: Way) -> None:
        base_TPRH = self.base[i, :, :, :rows]
        room = self.peers.room(i)[: PARTS * rows * HIDDEN].view(PARTS, rows, HIDDEN)
        torch.mul(base_TPRH[self.peers.rank], self.turn_1, out=room)
        residual = torch.zeros(rows, HIDDEN, device=self.device)
        out = torch.empty(rows, HIDDEN, device=self.device, dtype=self.weight.dtype)
        self.peers.add_rms_norm(room, residual, self.weight, EPS, out_RH=out, way=way)
        whole = torch.zeros_like(residual)
        part_LRH = (base_TPRH * self.turn_1).flatten(0, 1)
        expected = add_rms_norm(part_LRH, whole, self.weight, EPS)
        self.differ += ((out != expected).any() | (residual != whole).any()).long()

    def gathered(self) -> None:
        whole = (self.base[-1, :, 0, 0] * self.turn_1).view(torch.int32)
        mine = self.peers.room(ROUND - 1)[:HIDDEN].view(torch.int32)
        mine.copy_(whole[self.peers.rank])
        out = torch.empty(RANKS, HIDDEN, dtype=torch.int32, device=self.device)
        self.differ += (self.peers.gather(mine, out) != whole).any().long()


def connected(meeting: Meeting) -> tuple[PeerWindows, object]:
    """Return the windows and what keeps them mapped."""
    rank, size = meeting.rank, window_bytes(SIZES)
    if DEVICE == "cpu":
        windows = [
            torch.from_file(
                str(meeting.folder / f"window-{t}"), shared=True, size=size, dtype=torch.uint8
            )
            for t in range(RANKS)
        ]
        addresses = [each.data_ptr() for each in windows]
        own = windows[rank]
        return peer_windows(rank, addresses, own, landing=SIZES.landing, timeout_s=WAIT_S), windows
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mapped = GroupWindows(rank, SIZES, device)
    return mapped.open(meeting.told("grants", mapped.grant), timeout_s=WAIT_S), mapped


@patch.object(exchange, "PROGRAMS", tl.constexpr(MOST))
def main(device: str, exchanges: int, folder: Path, number: int) -> int:
    """Return how many results differ."""
    assert device == DEVICE
    meeting = Meeting(folder, number, RANKS, WAIT_S)
    peers, mapped = connected(meeting)
    rank, pauses = Rank(peers), random.Random(number)
    meeting.told("windows are zero")
    run = rank.round
    if device == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            rank.round()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                rank.round()
        torch.cuda.synchronize()
        run = graph.replay
        meeting.told("graphs are captured")
    for count in range(exchanges // ROUND):
        run()
        if pauses.random() < (0.001 if device == "cuda" else 0.5):
            time.sleep(pauses.random() * 0.01)
        if count % 1000 == 999:  # the queue of launches stays short
            assert not peers.failure(), peers.failure()
    assert not peers.failure(), peers.failure()
    differ = int(rank.differ.item())
    meeting.told("nothing is read any more")
    del mapped
    return differ


if __name__ == "__main__":
    asked = int(sys.argv[2])
    with patched_once() if DEVICE == "cpu" else nullcontext():
        differ = main(sys.argv[1], asked, Path(sys.argv[3]), int(sys.argv[4]))
    print(asked, "exchanges,", differ, "differ")
