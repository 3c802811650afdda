"""Chooses the sequences of the next step, and applies the results of a finished step. No tensors.

Decoding sequences come first (one row each), then prompt rows in order of arrival within the token
budget, then new sequences while pages and batch slots last; `waiting` decides their order. If
owners share the engine, the sequences of an owner that exceeds its share of the time take turns
(`time_shares`). A sequence without a page for its next row preempts the youngest. So does a
sequence of an owner below its share while another owner is above its own (`shares`). Every
submitted sequence ends in exactly one output with a `finish_reason`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from tlt_server.engine.gate import StepGate
from tlt_server.engine.schedule.batch import Batch, Chunk
from tlt_server.engine.schedule.ledger import Ledger
from tlt_server.engine.schedule.new_weights import NewWeights
from tlt_server.engine.schedule.outputs import End, truncate
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.sequence import Emission, SavedKV, Sequence
from tlt_server.engine.schedule.shares import PromptRows, Shares
from tlt_server.engine.schedule.starts import Starts
from tlt_server.engine.schedule.step_cost import StepCost
from tlt_server.engine.schedule.time_shares import TimeShares
from tlt_server.engine.schedule.waiting import WaitingSequences
from tlt_server.errors import InvalidRequest, TltError
from tlt_server.wire.commands import InFlight
from tlt_server.wire.records import OFF, LoadedAdapter, StepOutput, Strategy


def unpadded(decoding: int, max_rows: int) -> int:
    """Return the prompt rows that fit in a step of `max_rows` next to its decode rows, unpadded."""
    return max_rows - decoding


class Scheduler:
    def __init__(
        self,
        gate: StepGate,
        running: RunningSet,
        *,
        max_rows: int,
        lookahead: int,
        weight_version: str,
        prompt_budget: Callable[[int, int], int] = unpadded,
        on_start: Callable[[list[str]], None] = lambda ids: None,
        on_end: Callable[[Sequence], None] = lambda sequence: None,
        save: Callable[[list[int]], object] = lambda pages: None,
        restore: Callable[[Any, list[int]], None] = lambda saved, pages: None,
        clock: Callable[[], float] = time.monotonic,
        cost: StepCost | None = None,
    ) -> None:
        """`prompt_budget(decoding, max_rows)` comes from the device, which may pad. `on_start` gets
        the ids of all running sequences, before a step that starts one.
        """
        self.gate, self.running, self.pool = gate, running, running.pool
        self.max_rows, self.lookahead = max_rows, lookahead
        self.weight_version = weight_version
        self.preemptions, self._stalled = 0, False  # stalled: the last step had nothing to run
        self._prompt_budget, self._on_start = prompt_budget, on_start
        self._save, self._clock = save, clock
        self._waiting = WaitingSequences()
        self._open = Ledger(running, self._waiting, on_end, self.check)
        self.faults, self._chunks = self._open.faults, self._open.chunks
        self._time_shares = TimeShares(
            running, self._waiting, cost or StepCost(), max_rows=max_rows
        )
        self._new_weights = NewWeights(running, self._waiting, self._requeue, self.abort)
        self._starts = Starts(
            gate, running, self._waiting, self._preempt, restore, clock, self._time_shares.expected
        )

    # -- submit and end ----------------------------------------------------------------------------

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue a batch, all or none. `InvalidRequest` if a sequence can never run or its id is in
        use.
        """
        batch = list(sequences)
        capacity = min(self.pool.pages, self.running.page_table_SP.shape[1]) * self.pool.page_size
        names: set[str] = set()
        for sequence in batch:
            need = sequence.length + sequence.remaining
            if need > capacity:
                raise InvalidRequest(
                    f"request {sequence.id}: its prompt of {sequence.prompt_len} tokens plus "
                    f"max_tokens {sequence.request.sampling.max_tokens} needs {need} positions, "
                    f"this server holds {capacity}; lower max_tokens or start it with more pages"
                )
            if sequence.id in self._open or sequence.id in names:
                raise InvalidRequest(
                    f"request id {sequence.id!r} is already in use; "
                    "ids must be unique while a request runs"
                )
            names.add(sequence.id)
        for sequence in batch:
            sequence.arrived_s = self._clock()
            sequence.start_over(self.weight_version)
        self._open.open(batch)

    def abort(
        self, ids: Iterable[str], finish_reason: str = "abort", *, all: bool = False
    ) -> list[StepOutput]:
        """End these sequences (or all) as `Ledger.abort` does."""
        return self._open.abort(ids, finish_reason, all=all)

    def abandon(self) -> None:
        """End all background sequences, running or waiting, without an output."""
        if self.in_background:
            self.abort((), all=True)

    def fail(self, error: TltError) -> list[StepOutput]:
        """End all sequences with this error."""
        return self._open.fail(error)

    def expire(self) -> list[StepOutput]:
        """End every sequence with a passed deadline, and send every chunk whose time is over."""
        self._chunks.now_s = self._clock()
        return self._open.expire(self._chunks.now_s) + self._chunks.overdue()

    # -- the next step -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._open

    @property
    def in_background(self) -> bool:
        """Return True if the engine is running background sequences; they never share a step with
        others.
        """
        return any(sequence.background for sequence in islice(self._open, 1))

    @property
    def due(self) -> bool:
        """Return True if the next step has sequences to run."""
        return not self.idle and not self.gate.closed

    @property
    def compiling(self) -> bool:
        """Return True if the last step could run nothing, as sequences wait for a grammar or
        mask.
        """
        return self._stalled and any(not s.state.ready for s in self._open)

    @property
    def holds_kv(self) -> bool:
        """Return True if a sequence has pages. Waiting sequences have none. The KV saved from a
        mixed-version sequence is stored elsewhere and never serves another sequence.
        """
        return len(self.running) > 0

    def next_batch(self) -> Batch | None:
        """Return the rows of the next step, with pages reserved; None when nothing can run."""
        if self.gate.closed:
            return None
        background = self.in_background
        max_rows = self._time_shares.soon_over(self.max_rows) if background else self.max_rows
        cuts = self._time_shares.cuts()
        chunks = [
            chunk
            for sequence in self._time_shares.in_turn(cuts)
            if (chunk := self._decode_chunk(sequence))
        ]
        reading = [sequence for sequence in self.running if sequence.unlaunched > 1]
        owners = len(self._waiting.owners.union(sequence.owner for sequence in reading))
        rows = PromptRows(
            self._prompt_budget(len(chunks), max_rows),
            owners,
            {owner: cut.prompt for owner, cut in cuts.items()},
        )
        for sequence in reading:
            rows.give(sequence)
        started = self._start(rows)
        if owners > 1 and rows.left > 0:
            rows.give_rest()
            started |= self._start(rows)
        if started:
            self._on_start([sequence.id for sequence in self.running])
        chunks += [
            Chunk(sequence, sequence.launched, min(sequence.launched + count, sequence.length))
            for sequence, count in rows.by_sequence.items()
            if count
        ]
        chunks = [chunk for chunk in chunks if chunk.sequence.batch_slot >= 0 and not chunk.void]
        self._time_shares.settled(cuts)
        self._stalled = not chunks
        if not chunks:
            return None
        owners_now = () if background else tuple(self.running.owners)
        return Batch(chunks, self.weight_version, owners_now)

    def _start(self, rows: PromptRows) -> bool:
        """Start waiting sequences while the step has rows for them. Return True if any started."""
        before = self._starts.count
        while rows.left > 0 and (sequence := self._starts.next(rows.part)):
            rows.give(sequence)
        return self._starts.count > before

    def launched(self, batch: Batch, depth: int) -> None:
        """Record that the batch is in flight, with draft trees of at most this depth. `commit`
        receives the batches in the same order.
        """
        for chunk in batch.chunks:
            chunk.launch(depth)

    def _decode_chunk(self, sequence: Sequence) -> Chunk | None:
        end = sequence.length + sequence.remaining
        while sequence.batch_slot >= 0:
            root_end = sequence.length + sequence.ahead
            if self.running.reserve(sequence, min(root_end, end)):
                self.running.reserve(sequence, min(root_end + self.lookahead, end))
                return Chunk(sequence, root_end - 1, root_end)
            self._preempt(Shares(self.running, set()).greediest())
        return None

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.mixed_version:  # no single version could compute its KV again
            pages = sequence.pages[: -(-sequence.computed // self.pool.page_size)]
            sequence.saved = SavedKV(self._save(pages), sequence.computed)
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def give_up_pages(self) -> None:
        """Return all running sequences to the queue, without KV, ahead of unstarted ones, and
        forget cached prefixes. No step may be in flight.
        """
        for sequence in reversed([*self.running]):
            self._preempt(sequence)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Hide the current KV from later sequences. Running sequences keep using their own."""
        for sequence in self.running:
            sequence.private = True  # its next pages are computed from what is forgotten here
        self.pool.clear_index()

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.prompt_logprobs = None
        self._waiting.put_back(sequence)

    # -- after a step ------------------------------------------------------------------------------

    def commit(
        self, batch: Batch, emissions: list[Emission], strategy: Strategy = OFF
    ) -> list[StepOutput]:
        """Apply the runner's results under this strategy; `emissions[i]` belongs to
        `batch.chunks[i]`.
        """
        self._chunks.now_s = self._clock()
        return [
            said
            for chunk, emission in zip(batch.chunks, emissions, strict=True)
            if not chunk.void
            and (said := self._take_in(chunk, emission, batch.weight_version, strategy))
            and not chunk.sequence.background
        ]

    def _take_in(
        self, chunk: Chunk, emission: Emission, version: str, strategy: Strategy
    ) -> StepOutput | None:
        try:
            return self._apply(chunk, emission, version, strategy)
        except Exception as error:
            return self._open.failed(chunk.sequence, error)

    def observe(self, batch: Batch, ms: float) -> None:
        """Record the measured time of a step."""
        self._time_shares.observe(batch, ms)

    def _apply(
        self, chunk: Chunk, emission: Emission, version: str, strategy: Strategy
    ) -> StepOutput | None:
        sequence = chunk.sequence
        chunk.land()
        if emission.prompt_logprobs is not None:
            # A prompt of one token comes again after a step that left its sequence out.
            known = sequence.prompt_logprobs if chunk.start else None
            sequence.prompt_logprobs = [*(known or []), *emission.prompt_logprobs]
        if not chunk.samples:
            sequence.computed = chunk.end
            self._publish(sequence)
            return None
        if emission.error is not None:
            self.pool.withdraw(sequence.pages)  # where its KV went wrong is not known
            return self._open.end(sequence, End("error", error=emission.error))
        # Without a token the request wanted the prompt only.
        end = truncate(emission, sequence.state.stop_ids, sequence.remaining)
        emission.weight_version = sequence.version_of(version) if emission.tokens else ""
        if sequence.trace is not None:
            with self.faults.containing(f"the record of sequence {sequence.id}"):
                sequence.trace.emitted(sequence, emission, strategy, decodes=chunk.decodes)
        if emission.tokens:
            self._chunks.note(sequence, len(emission.tokens))
        sequence.append(emission.tokens)
        self._waiting.emitted(sequence, len(emission.tokens))
        sequence.computed = sequence.length - 1
        sequence.launched = sequence.length if sequence.sure else sequence.computed
        self._publish(sequence)
        if not end and not emission.tokens:
            return None  # the step has left the sequence out, as its mask was not ready
        if end:
            return self._open.end(sequence, end, emission)
        return self._chunks.add(sequence, emission)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.page_size
        if sequence.shares and full > sequence.published:
            new = slice(sequence.published, full)
            keys = sequence.page_keys(full)
            for page, key in zip(sequence.pages[new], keys[new], strict=True):
                self.pool.publish(page, key)
            sequence.published = full

    # -- new weights -------------------------------------------------------------------------------

    def using(self, adapter: str = "") -> list[Sequence]:
        """Return the sequences with this adapter; all sequences if it is empty."""
        return [s for s in self._open if adapter in ("", s.request.lora)]

    def started(self, adapter: str = "") -> int:
        """Count the sequences with this adapter that have started."""
        return sum(s.has_started for s in self.using(adapter))

    def change_version(self, version: str, in_flight: InFlight) -> list[StepOutput]:
        """Compute every later step with `version`. Return the tokens held of the one before, and
        the sequences that this ends.
        """
        self.weight_version = version
        held = self._chunks.flush()
        return held + self._new_weights.take_over(self.using(), version, in_flight)

    def change_adapter(self, adapter: LoadedAdapter, in_flight: InFlight) -> list[StepOutput]:
        """Compute the sequences with this adapter by this version of it in later steps. Return as
        `change_version` does.
        """
        affected, held = self.using(adapter.name), self._chunks.flush()
        return held + self._new_weights.replaced(affected, adapter, self.weight_version, in_flight)

    def take_gaps(self) -> list[tuple[float, int, int]]:
        """Take the times between outputs since the last call: seconds, tokens, sequences."""
        gaps, self._chunks.gaps = self._chunks.gaps, Counter()
        return [(seconds, tokens, count) for (seconds, tokens), count in gaps.items()]

    # -- looking in --------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        return {
            "running": 0 if self.in_background else len(self.running),
            "waiting": 0 if self.in_background else len(self._waiting),
            "pages_free": self.pool.available,
            "pages_cached": self.pool.cached,
            "preemptions": self.preemptions,
            "spanning": sum(s.mixed_version for s in self._open),
        }

    def check(self) -> None:
        """Assert every invariant; the property tests call this after each operation."""
        self.gate.check()
        self.running.check()
        self._waiting.check()
        self._open.check()
        for s in self.running:
            assert 0 <= s.computed < s.length and s.computed <= s.capacity, (
                f"{s.id}: computed {s.computed}, capacity {s.capacity}"
            )
            assert 0 <= s.sure <= s.ahead and bool(s.sure) == bool(s.ahead), (
                f"{s.id}: {s.sure} to {s.ahead} tokens are in flight"
            )
            assert s.computed <= s.launched <= s.length, (
                f"{s.id}: launched {s.launched}, computed {s.computed} of {s.length}"
            )
        for s in self._waiting:
            assert s.batch_slot < 0 and not s.pages and s.computed == 0 and not s.private, (
                f"{s.id} waits but holds something"
            )
