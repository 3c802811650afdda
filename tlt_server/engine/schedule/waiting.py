"""The sequences that wait for a batch slot. Only this module decides which one starts next.

Preempted sequences start before all others. Then the lowest `priority` comes first; within a
priority the owners (API keys) take turns by tokens, and each owner's sequences start in order of
arrival. With one owner and one priority that is the order of arrival. One start in `AGED` goes to
the priority with the longest-waiting sequence, so none waits for ever: finitely many sequences
arrived before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.process.turns import Turns

QUANTUM = 256  # tokens of one turn; several small starts
PREPAID = 64  # output tokens that a start is charged, so that short prompts do not start in floods
AGED = 8  # every 8th start disregards priorities


class _Class:
    """The sequences of one priority that have not run yet."""

    def __init__(self) -> None:
        self.turns = Turns(QUANTUM)
        self.queues: dict[str, OrderedDict[str, Sequence]] = {}  # by owner, then by id

    def add(self, sequence: Sequence) -> None:
        self.queues.setdefault(sequence.owner, OrderedDict())[sequence.id] = sequence
        self.turns.wait(sequence.owner)

    def remove(self, sequence: Sequence) -> None:
        queue = self.queues[sequence.owner]
        del queue[sequence.id]
        if not queue:
            del self.queues[sequence.owner]
            self.turns.leave(sequence.owner)

    @property
    def oldest_s(self) -> float:
        return min(next(iter(queue.values())).arrived_s for queue in self.queues.values())


class WaitingSequences:
    def __init__(self) -> None:
        self._again: OrderedDict[str, Sequence] = OrderedDict()  # ran before; the next one first
        self._classes: dict[int, _Class] = {}  # by priority
        self._ids: dict[str, Sequence] = {}
        self._starts = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, in no particular order."""
        return iter(self._ids.values())

    @property
    def owners(self) -> set[str]:
        """Owners of sequences that have not run yet."""
        return {owner for each in self._classes.values() for owner in each.queues}

    def firsts(self) -> dict[str, Sequence]:
        """Return each owner's next sequence to start, without sequences that have run."""
        return {
            owner: next(iter(queue.values()))
            for priority in sorted(self._classes, reverse=True)
            for owner, queue in self._classes[priority].queues.items()
        }

    def add(self, sequence: Sequence) -> None:
        self._ids[sequence.id] = sequence
        self._classes.setdefault(sequence.request.priority, _Class()).add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Return a sequence that ran to the queue, as the next one to start."""
        self._ids[sequence.id] = sequence
        self._again[sequence.id] = sequence
        self._again.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._ids[sequence.id]
        if self._again.pop(sequence.id, None) is None:
            self._classes[sequence.request.priority].remove(sequence)
            self._drop_empty(sequence.request.priority)

    def start(self, sequence: Sequence, rows: int) -> None:
        """Remove a sequence whose prompt needs this many rows from the queue, and charge its
        owner.
        """
        if sequence.id not in self._again:
            self._starts += 1
            self._charge(sequence, rows + min(PREPAID, sequence.remaining))
        self.remove(sequence)

    def emitted(self, sequence: Sequence, tokens: int) -> None:
        """Charge a running sequence's newest tokens, except those that its start has paid for."""
        if self._classes:
            beyond = sequence.output_len - max(PREPAID, sequence.output_len - tokens)
            self._charge(sequence, max(0, beyond))

    def order(self) -> Iterator[Sequence]:
        """Yield the waiting sequences in starting order. A caller that cannot start one may start a
        later one.
        """
        yield from self._again.values()
        for each in self._ordered():
            for owner in each.turns.order():
                yield from each.queues[owner].values()

    def heads(self) -> Iterator[Sequence]:
        """Yield each owner's first sequence in the next class, in owner order, without sequences
        that have run.
        """
        for each in self._ordered()[:1]:
            for owner in each.turns.order():
                yield next(iter(each.queues[owner].values()))

    def _ordered(self) -> list[_Class]:
        if len(self._classes) > 1 and self._starts % AGED == AGED - 1:
            return sorted(self._classes.values(), key=lambda each: each.oldest_s)
        return [self._classes[priority] for priority in sorted(self._classes)]

    def _charge(self, sequence: Sequence, tokens: int) -> None:
        if each := self._classes.get(sequence.request.priority):
            each.turns.charge(sequence.owner, tokens)

    def _drop_empty(self, priority: int) -> None:
        if not self._classes[priority].queues:
            del self._classes[priority]

    def check(self) -> None:
        """Assert every invariant."""
        unstarted = [
            (priority, owner, sequence)
            for priority, each in self._classes.items()
            for owner, queue in each.queues.items()
            for sequence in queue.values()
        ]
        assert self._again.keys() | {s.id for _, _, s in unstarted} == self._ids.keys(), (
            "a waiting sequence is lost"
        )
        assert len(self._again) + len(unstarted) == len(self._ids), "a sequence waits twice"
        assert all(
            (priority, owner) == (s.request.priority, s.owner) for priority, owner, s in unstarted
        ), "a sequence waits in another's place"
        for each in self._classes.values():
            each.turns.check()
            assert each.queues and all(each.queues.values()), "an empty queue is kept"
            assert set(each.turns.order()) == each.queues.keys(), "turns and queues differ"
