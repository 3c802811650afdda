"""Shares of owners (API keys) in a step: which owner must release a batch slot or pages for an
owner below its share, and how a step's prompt rows are divided.

A share is the total divided by the number of owners with sequences. An owner may exceed its share
while no other needs the rest. A single owner is unaffected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Sequence


class Shares:
    """The batch slots and pages that each owner holds now."""

    def __init__(self, running: RunningSet, waiting: set[str]) -> None:
        """`waiting`: the owners of sequences that have not run yet."""
        self._running = running
        self._slots, self._pages = Counter[str](), Counter[str]()
        for sequence in running:
            self._slots[sequence.owner] += 1
            self._pages[sequence.owner] += len(sequence.pages)
        self.owners = len(self._slots.keys() | waiting)
        self._slot_share = max(1, running.max_running // max(1, self.owners))
        self._page_share = running.pool.pages // max(1, self.owners)

    def allow(self, sequence: Sequence, pages: int) -> bool:
        """Return True if this sequence and these extra pages keep its owner within half of its
        share. The other half is granted only in turn, since every preemption costs rows.
        """
        owner = sequence.owner
        return (
            self._slots[owner] < max(1, self._slot_share // 2)
            and self._pages[owner] + pages <= self._page_share // 2
        )

    def gives_way(self) -> Sequence | None:
        """Return the sequence to preempt for such an owner: the youngest of the owner with the most
        pages or, if the batch slots are full, with the most slots; None if that owner is within its
        share.
        """
        full = self._running.full
        holds, share = (self._slots, self._slot_share) if full else (self._pages, self._page_share)
        owner = max(holds, key=holds.__getitem__, default="")
        return self._youngest(owner) if holds[owner] > share else None

    def greediest(self) -> Sequence:
        """Return the youngest sequence of the owner with the most pages."""
        return self._youngest(max(self._pages, key=self._pages.__getitem__))

    def _youngest(self, owner: str) -> Sequence:
        return [sequence for sequence in self._running if sequence.owner == owner][-1]


class PromptRows:
    """The prompt rows of one step. Every owner gets an equal part first; the rest goes to the
    sequences in order, up to the row limits of some owners.
    """

    def __init__(self, budget: int, owners: int, most: Mapping[str, int]) -> None:
        self.left = budget
        self._most = most
        self.by_sequence: dict[Sequence, int] = {}
        self._part = -(-budget // max(1, owners))
        self._given = Counter[str]()  # rows, by owner

    def part(self, owner: str) -> int:
        """Return the number of rows that an owner may still have."""
        part = min(self._part, self._most.get(owner, self._part))
        return min(self.left, part - self._given[owner])

    def give(self, sequence: Sequence) -> None:
        """Give a sequence the rows that it needs, from its owner's part."""
        before = self.by_sequence.get(sequence, 0)
        more = max(0, min(sequence.unlaunched - before, self.part(sequence.owner)))
        self.by_sequence[sequence] = before + more
        self._given[sequence.owner] += more
        self.left -= more

    def give_rest(self) -> None:
        """Stop reserving parts: later callers get the remaining rows in order."""
        self._part += self.left
        for sequence in self.by_sequence:
            self.give(sequence)
