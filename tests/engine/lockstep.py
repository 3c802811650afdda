"""Ranks in lockstep on one device: a thread per rank computes in its turn, until all have come to
an exchange, which then waits for none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.kernels.triton_tests import DEVICE
from tlt_kernels.gpu.exchange import PeerWindows, Way, WindowSizes, peer_windows, window_bytes
from tlt_server.models.gpu.sums import LayerSums

WAIT_S = 300.0  # for a rank's turn, in which kernels may be compiled
T = TypeVar("T")


class Turns:
    """One rank computes at a time: Triton's interpreter has one state."""

    def __init__(self, ranks: int) -> None:
        self._turn, self._all = threading.Lock(), threading.Barrier(ranks, timeout=WAIT_S)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Compute. A rank that fails ends the waits of the others."""
        self._turn.acquire()
        try:
            yield
        except BaseException:
            self._all.abort()
            raise
        finally:
            self._turn.release()

    def meet(self) -> None:
        self._turn.release()
        try:
            self._all.wait()
        finally:
            self._turn.acquire()


class LockstepPeers:
    """Implements `tlt_kernels.gpu.exchange.RankPeers`. Real ranks are up to one exchange apart, so
    no two that follow one another may use the same memory.
    """

    def __init__(self, windows: PeerWindows, turns: Turns) -> None:
        self.rank, self.ranks, self.device = windows.rank, windows.ranks, windows.device
        self.room, self.parts, self.missed = windows.room, windows.parts, windows.missed
        self.turns, self._windows = turns, windows
        self._read = range(0)  # addresses of the newest exchange

    def add_rms_norm(self, part_PRH: Tensor, *sums: Any, **more: Any) -> Tensor:
        self._meet(part_PRH)
        return self._windows.add_rms_norm(part_PRH, *sums, **more, way=Way.PULL)

    def gather(self, mine_X: Tensor, out_TX: Tensor) -> Tensor:
        self._meet(mine_X)
        return self._windows.gather(mine_X, out_TX)

    def _meet(self, mine: Tensor) -> None:
        before, first = self._read, mine.data_ptr()
        self._read = range(first, first + mine.nbytes)
        apart = self._read.stop <= before.start or before.stop <= first
        assert apart, "peers may still read this memory"
        self.turns.meet()

    def failure(self, missed_T: Sequence[Sequence[int]] = ()) -> str:
        return self._windows.failure(missed_T)

    def mute(self) -> None: ...

    def reset(self) -> None: ...


def group(ranks: int, floats: int) -> list[PeerWindows]:
    size = window_bytes(WindowSizes(floats))
    windows = []
    for _ in range(ranks):
        whole = torch.zeros(size + 1024, dtype=torch.uint8, device=DEVICE)
        windows.append(whole[-whole.data_ptr() % 1024 :][:size])
    addresses = [each.data_ptr() for each in windows]
    peers = [peer_windows(rank, addresses, windows[rank]) for rank in range(ranks)]
    for each in peers:
        each.mute()
    return peers


def in_lockstep(turns: Turns, computing: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the ranks compute."""

    def compute(rank: Callable[[], T]) -> T:
        with torch.inference_mode(), turns.one():
            if DEVICE == "cuda":
                torch.cuda.set_device(0)  # a new thread has no context, which descriptors need
                torch.cuda.synchronize()
            return rank()

    with ThreadPoolExecutor(len(computing)) as threads:
        return list(threads.map(compute, computing))


def turns_of(sums: LayerSums) -> Turns:
    assert isinstance(sums.peers, LockstepPeers)
    return sums.peers.turns
