"""When which sequence is to be looked at: both its moments (begin by, end by) in one heap, so that
a step pays for what is due alone.

What has ended stays in the heap until it is due or the heap is mostly such; the scheduler, which
asks, knows what is open.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping

from tlt_server.engine.sequence import Sequence

MIN_SWEPT = 64  # entries; below it a sweep is not worth its while


class Deadlines:
    def __init__(self, open_by_id: Mapping[str, Sequence]) -> None:
        """`open_by_id` is the scheduler's own table."""
        self._open = open_by_id
        self._heap: list[tuple[float, int, Sequence]] = []
        self._serial = itertools.count()  # so that sequences are never compared

    def add(self, sequence: Sequence) -> None:
        for moment_s in (sequence.request.begin_by_s, sequence.request.deadline_s):
            if moment_s is not None:
                heapq.heappush(self._heap, (moment_s, next(self._serial), sequence))
        if len(self._heap) > MIN_SWEPT + 4 * len(
            self._open
        ):  # an open one has at most two entries: half of this has ended
            self._heap = [entry for entry in self._heap if self._is_open(entry[2])]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[Sequence]:
        """Open sequences of which a moment has come, each once, in the order of those moments. They
        are not named again for it.
        """
        found: dict[str, Sequence] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, _, sequence = heapq.heappop(self._heap)
            if self._is_open(sequence):
                found[sequence.id] = sequence
        return list(found.values())

    def _is_open(self, sequence: Sequence) -> bool:
        return self._open.get(sequence.id) is sequence  # an id may be used again

    def check(self) -> None:
        """Assert every invariant."""
        assert all(self._heap[(i - 1) // 2] <= self._heap[i] for i in range(1, len(self._heap))), (
            "the heap is out of order"
        )
        assert len({serial for _, serial, _ in self._heap}) == len(self._heap), (
            "an entry stands twice in the heap"
        )
