"""Shares of owners (API keys) in a step: who gives a batch slot or pages back when another owner
has less than its share, and how a step's prompt rows are divided.

A share is what there is, divided by the owners that have sequences. An owner may use more as long
as no other needs it. With one owner nothing here changes anything.
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
        """Return True if its owner stays within half of its share with this sequence and these
        pages more. The other half comes in turn, since every preemption costs rows.
        """
        owner = sequence.owner
        return (
            self._slots[owner] < max(1, self._slot_share // 2)
            and self._pages[owner] + pages <= self._page_share // 2
        )

    def gives_way(self) -> Sequence | None:
        """Return the sequence that makes room for such an owner: the youngest of the
        owner that holds most pages, or most batch slots where those are full; None if that one is
        within its share.
        """
        full = self._running.full
        holds, share = (self._slots, self._slot_share) if full else (self._pages, self._page_share)
        owner = max(holds, key=holds.__getitem__, default="")
        return self._youngest(owner) if holds[owner] > share else None

    def greediest(self) -> Sequence:
        """Return the youngest sequence of the owner that holds most pages."""
        return self._youngest(max(self._pages, key=self._pages.__getitem__))

    def _youngest(self, owner: str) -> Sequence:
        return [sequence for sequence in self._running if sequence.owner == owner][-1]


class PromptRows:
    """The prompt rows of one step: every owner has an equal part first, and what is left goes to
    the sequences in their order, up to the rows that some owners have at most.
    """

    def __init__(self, budget: int, owners: int, most: Mapping[str, int]) -> None:
        self.left = budget
        self._most = most
        self.by_sequence: dict[Sequence, int] = {}
        self._part = -(-budget // max(1, owners))
        self._given = Counter[str]()  # rows, by owner

    def part(self, owner: str) -> int:
        """Return how many rows an owner may still have."""
        part = min(self._part, self._most.get(owner, self._part))
        return min(self.left, part - self._given[owner])

    def give(self, sequence: Sequence) -> None:
        """Give a sequence the rows that it needs, of its owner's part."""
        before = self.by_sequence.get(sequence, 0)
        more = max(0, min(sequence.unlaunched - before, self.part(sequence.owner)))
        self.by_sequence[sequence] = before + more
        self._given[sequence.owner] += more
        self.left -= more

    def give_rest(self) -> None:
        """End the parts: the next one who asks gets what is left."""
        self._part += self.left
        for sequence in self.by_sequence:
            self.give(sequence)
