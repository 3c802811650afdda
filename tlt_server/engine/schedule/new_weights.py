"""Moves running and waiting sequences to new weights, between two steps. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.schedule.waiting import WaitingSequences
from tlt_server.wire.commands import InFlight
from tlt_server.wire.records import LoadedAdapter, StepOutput


class NewWeights:
    def __init__(
        self,
        running: RunningSet,
        waiting: WaitingSequences,
        requeue: Callable[[Sequence], None],
        abort: Callable[[Iterable[str]], list[StepOutput]],
    ) -> None:
        self._running, self._waiting = running, waiting
        self._requeue, self._abort = requeue, abort

    def take_over(
        self, affected: Several[Sequence], version: str, in_flight: InFlight
    ) -> list[StepOutput]:
        """Move these sequences to new weights, with `version` of the target. Return those that this
        ends.

        `continue` keeps the KV of decoding sequences. `recompute` drops all KV: the sequences
        continue as if this version had read their tokens. `abort` ends started sequences with their
        current tokens. `drain` has waited until nothing runs. In every mode a sequence with
        incomplete KV (a partly read prompt, a preempted sequence without saved KV) starts over
        under this version.
        """
        ended: list[StepOutput] = []
        if in_flight == "abort":
            ended = self._abort([s.id for s in affected if s.has_started])
        ids = {s.id for s in affected}
        for sequence in reversed([s for s in self._running if s.id in ids]):
            if in_flight == "recompute" or not sequence.decoding:
                self._requeue(sequence)
            else:
                sequence.mixed_version = True
        for sequence in [s for s in self._waiting if s.id in ids]:
            if in_flight == "recompute":
                sequence.saved = None
            if sequence.saved is None:
                sequence.start_over(version)
        return ended

    def replaced(
        self, affected: Several[Sequence], adapter: LoadedAdapter, version: str, in_flight: InFlight
    ) -> list[StepOutput]:
        """Move these sequences to this version of their adapter."""
        for sequence in affected:
            sequence.adapter = adapter
        return self.take_over(affected, version, in_flight)
