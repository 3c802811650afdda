"""Deadlines of sequences, both of each (start by, end by) in one heap, so that a step pays only for
those that are due.

Entries of ended sequences remain until they are due, or until they are the majority. The scheduler
passes the table of open sequences.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping

from tlt_server.engine.schedule.sequence import Sequence

MIN_SWEPT = 64  # entries; a smaller heap is not worth a sweep


class Deadlines:
    def __init__(self, open_by_id: Mapping[str, Sequence]) -> None:
        """`open_by_id` is the scheduler's own table."""
        self._open = open_by_id
        self._heap: list[tuple[float, int, Sequence]] = []
        self._serial = itertools.count()  # keeps the heap from comparing sequences

    def add(self, sequence: Sequence) -> None:
        for moment_s in (sequence.request.begin_by_s, sequence.request.deadline_s):
            if moment_s is not None:
                heapq.heappush(self._heap, (moment_s, next(self._serial), sequence))
        # An open sequence has at most two entries, so at least half of a larger heap has ended.
        if len(self._heap) > MIN_SWEPT + 4 * len(self._open):
            self._heap = [entry for entry in self._heap if self._is_open(entry[2])]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[Sequence]:
        """Return the open sequences with a passed deadline, each once, in deadline order, and
        remove their due entries.
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
            "the heap holds an entry twice"
        )
