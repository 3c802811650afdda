"""The submitted sequences that have not ended. Each ends once, even if handling it raised: the
ledger takes back its pages and batch slot and returns its last output. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tlt_server.engine.schedule.deadlines import Deadlines
from tlt_server.engine.schedule.outputs import Chunks, End, output
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.engine.schedule.waiting import WaitingSequences
from tlt_server.errors import DeadlineExceeded, EngineFailed, QueueTimeout, TltError
from tlt_server.process.faults import Containment
from tlt_server.wire.records import StepOutput, last_output


class Ledger:
    def __init__(
        self,
        running: RunningSet,
        waiting: WaitingSequences,
        on_end: Callable[[Sequence], None],
        check: Callable[[], None],
    ) -> None:
        """`check`: asserts every invariant of the scheduler, after each contained fault."""
        self._running, self._waiting, self._on_end = running, waiting, on_end
        self.faults = Containment(check, ends=(EngineFailed,))
        self._by_id: dict[str, Sequence] = {}
        self.deadlines, self.chunks = Deadlines(self._by_id), Chunks()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def open(self, batch: Iterable[Sequence]) -> None:
        """Queue these sequences, all or none, under unused ids."""
        opened: list[Sequence] = []
        try:
            for sequence in batch:
                opened.append(sequence)
                self._by_id[sequence.id] = sequence
                self._waiting.add(sequence)
                self.deadlines.add(sequence)
        except Exception:
            for sequence in opened:
                self._take_back(sequence)
            raise

    def abort(self, ids: Iterable[str], finish_reason: str, *, all: bool) -> list[StepOutput]:
        """End these sequences (or all), each once, with their current tokens. Unknown ids are
        treated as finished.
        """
        names = list(self._by_id) if all else dict.fromkeys(ids)
        chosen = [self._by_id[name] for name in names if name in self._by_id]
        return [self.end(sequence, End(finish_reason)) for sequence in chosen]

    def fail(self, error: TltError) -> list[StepOutput]:
        """End all sequences with this error."""
        return [self.end(sequence, End("error", error=error)) for sequence in [*self]]

    def expire(self, now_s: float) -> list[StepOutput]:
        """End every sequence, running or waiting, whose end deadline has passed, and every one that
        has not started by its start deadline.
        """
        ended: list[StepOutput] = []
        for sequence in self.deadlines.due(now_s):
            request = sequence.request
            error: TltError | None = None
            if request.deadline_s is not None and request.deadline_s <= now_s:
                error = DeadlineExceeded(
                    "the request's deadline passed before it finished; "
                    "raise timeout_s or ask for fewer tokens"
                )
            elif not sequence.has_started:
                error = QueueTimeout(
                    "the engine did not start this sequence within its queue_timeout_s, as others "
                    "came first; send it again later or raise queue_timeout_s"
                )
            if error is not None:
                ended.append(self.end(sequence, End("error", error=error)))
        return ended

    def end(self, sequence: Sequence, end: End, emission: Emission | None = None) -> StepOutput:
        try:
            with self.faults.containing(f"the record of sequence {sequence.id}"):
                if sequence.trace is not None:
                    sequence.trace.ended(sequence, end.finish_reason)
            self._take_back(sequence)
            with self.faults.containing(f"what follows sequence {sequence.id}"):
                self._on_end(sequence)
            return output(sequence, self.chunks.take(sequence, emission or Emission()), end)
        except Exception as error:
            return self.failed(sequence, error)

    def failed(self, sequence: Sequence, error: Exception) -> StepOutput:
        """End only this sequence, whose handling raised this error."""
        self.chunks.take(sequence, Emission())
        self._running.pool.withdraw(sequence.pages)  # its KV may be wrong
        self._take_back(sequence)
        fault = self.faults.contain(error, f"sequence {sequence.id}")
        return last_output(sequence.id, "error", (fault.code, fault.message))

    def _take_back(self, sequence: Sequence) -> None:
        """Take back the sequence's pages and slot, unless it has ended."""
        if self._by_id.get(sequence.id) is not sequence:
            return
        if sequence.batch_slot >= 0:
            self._running.remove(sequence)
        elif sequence.id in self._waiting:
            self._waiting.remove(sequence)
        del self._by_id[sequence.id]

    def check(self) -> None:
        """Assert every invariant."""
        self.deadlines.check()
        self.chunks.check(self._by_id.values())
        assert len({s.background for s in self}) < 2, "a request is not alone"
        running, waiting = {s.id for s in self._running}, {s.id for s in self._waiting}
        assert running | waiting == set(self._by_id), "a sequence is lost"
        assert len(running) + len(self._waiting) == len(self), "a sequence both runs and waits"
