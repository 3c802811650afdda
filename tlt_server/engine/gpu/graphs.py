"""The pool of captured CUDA graphs: capture, account, replay, and nothing else.

A key names static shapes; what is captured reads and writes the same buffers each time. Graphs share one memory pool, so their
intermediates overlap: only one may run at a time, and keys are captured from the largest to the smallest. A key that was not captured
runs launch by launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch


class GraphPool:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """Without a stream nothing is captured."""
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if stream is not None else None
        self.bytes: dict[Hashable, int] = {}  # device memory that capturing the key took
        self.seconds: dict[Hashable, float] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run once, which compiles what is not compiled yet, then record."""
        if self._stream is None or key in self._graphs:
            return
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()
            torch.cuda.empty_cache()  # what the run left behind is no part of the graph
            free, _ = torch.cuda.mem_get_info()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
            after, _ = torch.cuda.mem_get_info()
        self._graphs[key], self.bytes[key], self.seconds[key] = graph, free - after, time.perf_counter() - started

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the key, or do its work launch by launch."""
        graph = self._graphs.get(key)
        if graph is None:
            work()
        else:
            graph.replay()

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())
