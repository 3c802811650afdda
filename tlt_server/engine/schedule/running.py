"""The running sequences: each has a batch slot and pages, listed in its row of the page table.

The scheduler decides which sequences join and leave; this module keeps slots, pages and table
consistent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.schedule.pages import PagePool
from tlt_server.engine.schedule.sequence import Sequence


class RunningSet:
    def __init__(self, pool: PagePool, *, max_running: int, max_pages_per_sequence: int) -> None:
        self.pool, self.max_running = pool, max_running
        self.page_table_SP: NDArray[np.int32] = np.zeros(
            (max_running, max_pages_per_sequence), np.int32
        )
        self.owners = Counter[str]()  # batch slots, by owner
        self._sequences: list[Sequence] = []  # in order of admission
        # The slot that has been free for longest is taken first: on a GPU the text of the sequence
        # that left it may still be drafted from.
        self._free_slots = deque(range(max_running))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a snapshot of the sequences in order of admission."""
        return iter(list(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def free(self) -> int:
        """Batch slots without a sequence."""
        return len(self._free_slots)

    @property
    def full(self) -> bool:
        return not self._free_slots

    def add(self, sequence: Sequence, cached: list[int]) -> None:
        """Give the sequence a batch slot, its cached prefix pages, which are already held, and
        pages for the rest of its tokens, which must be available.
        """
        self._sequences.append(sequence)
        self.owners[sequence.owner] += 1
        sequence.batch_slot = self._free_slots.popleft()
        sequence.pages, sequence.published = cached, len(cached)
        sequence.computed = sequence.launched = len(cached) * self.pool.page_size
        self.page_table_SP[sequence.batch_slot, : len(cached)] = cached
        reserved = self.reserve(sequence, sequence.length)
        assert reserved, f"{sequence.id} was admitted without room for its tokens"

    def reserve(self, sequence: Sequence, positions: int) -> bool:
        """Extend the sequence's pages to this many positions. Without enough pages, return False
        and change nothing.
        """
        need = -(-positions // self.pool.page_size) - len(sequence.pages)
        if need > 0:
            pages = self.pool.allocate(need)
            if pages is None:
                return False
            start = len(sequence.pages)
            sequence.pages.extend(pages)
            self.page_table_SP[sequence.batch_slot, start : start + need] = pages
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take back the slot and the pages; in-flight results for the sequence become void."""
        self._sequences.remove(sequence)
        self.owners[sequence.owner] -= 1
        if not self.owners[sequence.owner]:
            del self.owners[sequence.owner]
        self._free_slots.append(sequence.batch_slot)
        self.pool.release(sequence.pages)
        sequence.leave()

    def check(self) -> None:
        """Assert every invariant."""
        self.pool.check([s.pages for s in self])
        assert sorted([*self._free_slots, *(s.batch_slot for s in self)]) == list(
            range(self.max_running)
        ), "batch slots leak"
        assert self.owners == Counter(s.owner for s in self), "an owner's slots leak"
        for s in self:
            assert self.page_table_SP[s.batch_slot, : len(s.pages)].tolist() == s.pages, (
                f"{s.id}: page table differs"
            )
