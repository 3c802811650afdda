"""Starts waiting sequences while batch slots and pages last. No tensors.

The next sequence in turn starts first. If it does not fit, a sequence of another owner that stays
within its share may start instead, if necessary by preempting an owner above its share. So a
sequence that needs more than half of its owner's share waits for its turn, until the others leave
room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tlt_server.engine.gate import StepGate
from tlt_server.engine.schedule.pages import PageKey
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.schedule.shares import Shares
from tlt_server.engine.schedule.waiting import WaitingSequences


class Starts:
    def __init__(
        self,
        gate: StepGate,
        running: RunningSet,
        waiting: WaitingSequences,
        preempt: Callable[[Sequence], None],
        restore: Callable[[Any, list[int]], None],
        clock: Callable[[], float],
        expected: Callable[[], int],
    ) -> None:
        """`expected()`: the owners without running sequences that may soon have some."""
        self._gate, self._running, self._pool = gate, running, running.pool
        self._waiting, self._preempt = waiting, preempt
        self._restore, self._clock, self._expected = restore, clock, expected
        self.count = 0

    def next(self, rows: Callable[[str], int]) -> Sequence | None:
        """Start one sequence of an owner that has `rows` left in this step, and return it. None if
        none can start.
        """
        return self._in_turn(rows) or self._claimed(rows)

    def _in_turn(self, rows: Callable[[str], int]) -> Sequence | None:
        """Start the next waiting sequence, if its pages fit. Skip a sequence whose prefix a running
        sequence is currently computing.
        """
        if self._running.full:
            return None
        pending, most = self._pending_keys(), self._most()
        for sequence in self._waiting.order():
            if not (self._may_start(sequence) and rows(sequence.owner)):
                continue
            if self._running.owners[sequence.owner] >= most:
                continue
            pages = self._cached(sequence, pending)
            if pages is not None:
                return self._start(sequence, pages)
        return None

    def _may_start(self, sequence: Sequence) -> bool:
        if not sequence.state.ready:
            return False
        return sequence.has_started or self._gate.lets_start(sequence.request.lora)

    def _most(self) -> int:
        """Return the number of batch slots that an owner may have now: all of them or, if the
        expected owners need the free ones, its share.
        """
        running, expected = self._running, self._expected()
        if expected < running.free or not running.owners:
            return running.max_running
        return max(1, running.max_running // (len(running.owners) + expected))

    def _claimed(self, rows: Callable[[str], int]) -> Sequence | None:
        """Start a sequence that keeps its owner well within its share, by preempting sequences of
        owners above theirs.
        """
        waiting = self._waiting.owners
        shares = Shares(self._running, waiting)
        if shares.owners < 2:
            return None
        pending = self._pending_keys()
        for sequence in self._waiting.heads():
            if not self._may_start(sequence):
                continue
            while rows(sequence.owner) and (pages := self._cached(sequence, pending)) is not None:
                if shares.allow(sequence, self._missing(sequence, pages)):
                    if started := self._start(sequence, pages):
                        return started
                    victim = shares.gives_way()
                else:
                    self._pool.release(pages)
                    victim = None
                if victim is None:
                    break
                self._preempt(victim)
                shares, pending = Shares(self._running, waiting), self._pending_keys()
        return None

    def _cached(self, sequence: Sequence, pending: set[PageKey]) -> list[int] | None:
        """Take the cached pages of its prefix; None if a running sequence is currently computing
        more of it.
        """
        keys = self._reusable_keys(sequence)
        pages = self._pool.match(keys)
        if len(pages) < len(keys) and keys[len(pages)] in pending:
            self._pool.release(pages)
            return None
        return pages

    def _missing(self, sequence: Sequence, pages: list[int]) -> int:
        return -(-sequence.length // self._pool.page_size) - len(pages)

    def _start(self, sequence: Sequence, pages: list[int]) -> Sequence | None:
        """Start the sequence with the cached pages of its prefix. If it does not fit, release them
        and return None.
        """
        # Leave a page for each that runs.
        room = self._pool.available - len(self._running)
        if self._running.full or self._missing(sequence, pages) > room:
            self._pool.release(pages)
            return None
        self._waiting.start(sequence, sequence.length - len(pages) * self._pool.page_size)
        self._running.add(sequence, pages)
        self.count += 1
        if sequence.saved is not None:
            self._restore(sequence.saved.kv, sequence.pages)
            sequence.computed = sequence.launched = sequence.saved.computed
            sequence.saved = None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        if sequence.queued_s is None:
            sequence.queued_s = self._clock() - sequence.arrived_s
        return sequence

    def _reusable_keys(self, sequence: Sequence) -> list[PageKey]:
        """Return the keys of the full pages that it may find cached: none if its KV was saved or it
        is read in the background. A sequence that wants prompt log-probs finds none before its
        first token: the log-probs need every prompt row, and are sent with that token.
        """
        wants_prompt = sequence.request.sampling.prompt_logprobs is not None
        reads_all = sequence.background or (wants_prompt and not sequence.output_len)
        if sequence.saved is not None or reads_all:
            return []
        return sequence.page_keys((sequence.length - 1) // self._pool.page_size)

    def _pending_keys(self) -> set[PageKey]:
        size = self._pool.page_size
        computing = [s for s in self._running if not s.decoding and s.shares]
        return {
            key for s in computing for key in s.page_keys((s.length - 1) // size)[s.published :]
        }
