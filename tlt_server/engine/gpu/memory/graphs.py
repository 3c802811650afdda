"""The pool of captured CUDA graphs: capture, account, replay, and nothing else.

A key names static shapes; a graph reads and writes the same buffers at each replay. Graphs share
one memory pool, so their intermediates overlap: only one may run at a time, and keys are captured
from the largest to the smallest. At start, keys are captured without a run, which takes half the
time. Later, a key without a graph runs launch by launch and is captured after its first run, if it
is worth keeping and the memory set aside for graphs lasts. When that memory is used up, one line on
stderr says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable

import torch

from tlt_server.engine.gpu.memory.budget import RESERVE, size
from tlt_server.engine.gpu.memory.refusals import BUSY, shortage
from tlt_server.weights.storage import ran_out

# Memory that a driver takes for one graph, at most. It shows in nothing but what is free on the
# device, from which trainers take, too.
DRIVER_BYTES = 4 << 20


RECORD_S = 0.05  # seconds that recording a graph takes, until one was recorded


def synchronize(stream: torch.cuda.Stream) -> None:
    stream.synchronize()


class GraphPool:
    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        most_bytes: int = RESERVE,
        quiet: Callable[[], bool] = lambda: True,
        drain: Callable[[torch.cuda.Stream], None] = synchronize,
    ) -> None:
        """`stream`: None captures nothing. `quiet`: capture only while this returns True, because a
        capture waits for all of the GPU's work. `drain`: waits for the stream, with a bound.
        """
        self._stream, self._most_bytes, self._quiet = stream, most_bytes, quiet
        self._drain = drain
        self._full = False  # until `clear`: what is not recorded yet runs launch by launch
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if stream is not None else None
        self.bytes: dict[Hashable, int] = {}  # device memory that capturing the key took
        self.seconds: dict[Hashable, float] = {}
        self.cleared = 0  # times that `clear` was called
        self.changes = 0  # times that a key was recorded, or all were cleared

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], None], *, keep: bool) -> None:
        """Replay the key. Without a graph, run its work launch by launch and, if `keep`, capture it
        for the next time.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        started = time.perf_counter()
        work()  # compiles what is not compiled yet
        if keep and self.open:
            self._record(key, work, started)

    def record(self, key: Hashable, work: Callable[[], None]) -> None:
        """Capture the key without running it, unless it has a graph. All of its kernels must be
        loaded. If `work` fails, nothing is captured.
        """
        if self.open and key not in self:
            self._record(key, work, time.perf_counter())

    @property
    def quiet(self) -> bool:
        """Return True if the pool may wait for the whole device."""
        return self._quiet()

    @property
    def open(self) -> bool:
        """Return True if anything may be captured now."""
        return self._stream is not None and not self._full and self._quiet()

    def _record(self, key: Hashable, work: Callable[[], None], started_s: float) -> None:
        """Capture the key; a capture executes nothing."""
        assert self._stream is not None
        self._drain(self._stream)
        torch.cuda.empty_cache()  # memory that runs have left is no part of the graph
        reserved = torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except RuntimeError as error:
            if not ran_out(error):
                raise
            left, total = torch.cuda.mem_get_info()
            self.end(
                f"the GPU has no room for the graph of {key}: "
                f"{shortage(str(error), free=left, total=total)}",
                f"lower --memory-fraction, which leaves less to KV, or {BUSY}",
            )
            return
        pooled = max(0, torch.cuda.memory_reserved() - reserved)
        after, _ = torch.cuda.mem_get_info()
        self._graphs[key] = graph
        self.changes += 1
        self.bytes[key] = pooled + min(max(0, free - after - pooled), DRIVER_BYTES)
        self.seconds[key] = time.perf_counter() - started_s
        if self.total_bytes >= self._most_bytes:
            self.end(
                f"{len(self._graphs)} graphs take {size(self.total_bytes)}, "
                f"{size(self._most_bytes)} are set aside for them",
                "lower --max-running, which asks for fewer",
            )

    def end(self, why: str, remedy: str) -> None:
        """Capture nothing more until `clear`, and report that once."""
        if self._full:
            return
        self._full = True
        print(
            f"tlt: {why}; what is not captured yet is launched kernel by kernel, which is slower: "
            f"{remedy}",
            file=sys.stderr,
        )

    def clear(self) -> None:
        """Drop every graph and free its memory, because addresses are about to change."""
        if self._stream is not None:
            self._drain(self._stream)
            self._pool = torch.cuda.graph_pool_handle()
        self._full = False
        self.cleared += 1
        self.changes += 1
        self._graphs.clear()
        self.bytes.clear()
        self.seconds.clear()

    @property
    def captures(self) -> bool:
        return self._stream is not None

    @property
    def records(self) -> bool:
        """Return True if a step without a graph would capture one."""
        return self.captures and not self._full and self._quiet()

    @property
    def record_s(self) -> float:
        """Return the seconds that capturing a graph takes, its run included."""
        return sum(self.seconds.values()) / len(self.seconds) if self.seconds else RECORD_S

    @property
    def spare(self) -> bool:
        """Return True if graphs that no step has needed yet may be captured now. They may use half
        of the memory.
        """
        return self.open and 2 * self.total_bytes < self._most_bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())
