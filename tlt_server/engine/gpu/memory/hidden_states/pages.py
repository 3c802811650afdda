"""States of KV pages in host memory, filled from a ring on the device.

The engine's thread queues the copy of the part that a step has filled into pinned memory, on a
separate stream. A worker thread waits for the copy, files the rows by page and hands whole
sequences on, so no step waits. Work is queued in the order of the steps: rows of a sequence are
filed before the sequence is taken and before its pages are reused.

Memory is bounded: above the bound, the oldest pages are dropped.

Legend: C slots of the ring, N rows of a step, X features, then hidden, as bytes.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu.hidden_states import StateRing
from tlt_kernels.gpu.tensors import PAGE_SIZE
from tlt_server.engine.record.hidden_states import Deliver, StateBytes
from tlt_server.samples.hidden_states import BFLOAT16, FLOAT32


class _Page(NamedTuple):
    state_PX: NDArray[np.uint8]
    filed_P: NDArray[np.bool_]


class PageStates:
    """A `StateSource`, and the host's half of a `StateRing`."""

    def __init__(
        self,
        ring: StateRing,
        *,
        feature_width: int,
        hidden_width: int,
        bound: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`bound`: bytes of pages on the host. `stream`: for copies; None without a GPU."""
        self.ring, self._bound, self._stream = ring, bound, stream
        item = ring.state_CX.element_size()
        self.item: Literal[2, 4] = FLOAT32 if item == FLOAT32 else BFLOAT16
        self.feature_width, self.hidden_width = feature_width, hidden_width
        pinned = stream is not None
        self._state_CX = torch.empty(
            ring.state_CX.shape, dtype=ring.state_CX.dtype, pin_memory=pinned, device="cpu"
        )
        self._tag_C2 = torch.empty(
            ring.tag_C2.shape, dtype=torch.int32, pin_memory=pinned, device="cpu"
        )
        self._bytes_CX = self._state_CX.view(torch.uint8).numpy()
        self._features = item * feature_width  # bytes
        self._page_bytes = PAGE_SIZE * self._bytes_CX.shape[1]
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # filed first, first
        self._claimed = self._freed = 0  # rows so far
        self.spent_s = 0.0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="tlt-states", daemon=True)
        self._worker.start()

    # the engine's thread

    @property
    def room(self) -> int:
        """Rows that later steps may claim."""
        return len(self._bytes_CX) - 1 - (self._claimed - self._freed)

    def drain(self, head: int, pages: Mapping[int, list[int]]) -> None:
        """Copy the rows of a step whose kernels have run; the ring's head was `head` after it.
        pages: of each batch slot whose rows count.
        """
        size = len(self._bytes_CX)
        first = self._claimed % size
        count = (head - first) % size
        if not count:
            return
        began = time.perf_counter()
        self._claimed += count
        event = torch.cuda.Event() if self._stream is not None else None
        with torch.cuda.stream(self._stream):
            for start, stop in _parts(first, count, size):
                for theirs, mine in (
                    (self.ring.state_CX, self._state_CX),
                    (self.ring.tag_C2, self._tag_C2),
                ):
                    mine[start:stop].copy_(theirs[start:stop], non_blocking=True)
            if event is not None:
                event.record()
        self._work.put(partial(self._file, event, first, count, pages))
        self.spent_s += time.perf_counter() - began

    def reuse(self, pages: Iterable[int]) -> None:
        """Drop the states of pages that are about to hold other tokens."""
        self._work.put(partial(self._forget, [*pages]))

    def take(self, pages: list[int], length: int, deliver: Deliver) -> None:
        self._work.put(partial(self._collect, pages, length, deliver))

    def settle(self) -> None:
        """Wait until all queued work is done."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    # the worker

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception:  # serving goes on; what failed is not handed on
                traceback.print_exc()

    def _file(
        self, event: torch.cuda.Event | None, first: int, count: int, pages: Mapping[int, list[int]]
    ) -> None:
        if event is not None:
            event.synchronize()
        try:
            self._file_rows(first, count, pages)
        finally:
            self._freed += count

    def _file_rows(self, first: int, count: int, pages: Mapping[int, list[int]]) -> None:
        tag_C2 = self._tag_C2.numpy()
        for start, stop in _parts(first, count, len(self._bytes_CX)):
            place_N, position_N = tag_C2[start:stop].T
            # Rows that follow each other in one page are copied at once.
            broken_N = (np.diff(position_N) != 1) | (np.diff(place_N) != 0)
            broken_N |= position_N[1:] % PAGE_SIZE == 0
            starts = np.concatenate([[0], np.flatnonzero(broken_N) + 1, [stop - start]])
            for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
                own, position = pages.get(int(place_N[a])), int(position_N[a])
                if own is not None and position // PAGE_SIZE < len(own):
                    page = self._page(own[position // PAGE_SIZE])
                    rows = slice(position % PAGE_SIZE, position % PAGE_SIZE + b - a)
                    page.state_PX[rows] = self._bytes_CX[start + a : start + b]
                    page.filed_P[rows] = True

    def _page(self, number: int) -> _Page:
        page = self._pages.get(number)
        if page is None:
            while self._pages and (len(self._pages) + 1) * self._page_bytes > self._bound:
                self._pages.popitem(last=False)
            page = _Page(
                np.empty((PAGE_SIZE, self._bytes_CX.shape[1]), np.uint8),
                np.zeros(PAGE_SIZE, np.bool_),
            )
            self._pages[number] = page
        return page

    def _forget(self, pages: list[int]) -> None:
        for page in pages:
            self._pages.pop(page, None)

    def _collect(self, pages: list[int], length: int, deliver: Deliver) -> None:
        found = [self._pages.get(page) for page in pages[: -(-length // PAGE_SIZE)]]
        whole = [page for page in found if page is not None]
        if len(whole) < len(found) or not _all_filed(whole, length):
            deliver(None)
            return
        state_TX = np.concatenate([page.state_PX for page in whole])[:length]
        features, hidden = state_TX[:, : self._features], state_TX[:, self._features :]
        deliver(StateBytes(*(np.ascontiguousarray(x).data for x in (features, hidden))))


def _all_filed(pages: list[_Page], length: int) -> bool:
    filed_T = np.concatenate([page.filed_P for page in pages])[:length]
    return bool(filed_T.all())


def _parts(first: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return the one or two contiguous parts of a ring that `count` slots from `first` on cover."""
    stop = first + count
    return [(first, stop)] if stop <= size else [(first, size), (0, stop - size)]
