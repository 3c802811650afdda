"""Who runs in the next step, and what a finished step means for them. No tensors.

Decoding sequences come first (one row each), then prompt rows in order of arrival while the step
has room for them, then new sequences while pages and places last. A sequence that finds no page for
its next row preempts the youngest. Every submitted sequence ends in exactly one output with a
`finish_reason`.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.batch import Batch, Chunk, Emission
from tlt_server.engine.deadlines import Deadlines
from tlt_server.engine.pages import PageKey, PagePool
from tlt_server.engine.sequence import SavedKV, Sequence
from tlt_server.errors import DeadlineExceeded, InvalidRequest, QueueTimeout, TltError
from tlt_server.records import InFlight, StepOutput, TokenLogprobs


def unpadded(decoding: int, max_rows: int) -> int:
    """Prompt rows that a step of `max_rows` has room for."""
    return max_rows - decoding


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_rows: int,
        max_pages_per_sequence: int,
        lookahead: int,
        weight_version: str,
        on_begin: Callable[[list[str]], None] = lambda ids: None,
        on_end: Callable[[Sequence], None] = lambda sequence: None,
        save: Callable[[list[int]], object] = lambda pages: None,
        restore: Callable[[Any, list[int]], None] = lambda saved, pages: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_begin` gets the ids of all that runs, before a step that begins a sequence."""
        self.pool, self.max_running, self.max_rows, self.lookahead = (
            pool,
            max_running,
            max_rows,
            lookahead,
        )
        self.room: Callable[[int, int], int] = unpadded  # as the device has it, which may pad
        self.weight_version = weight_version
        self.paused = False  # by an operator
        self.frozen = False  # weights are being written in place
        self.holding = False  # start nothing new; what has begun goes on
        self.preemptions = 0
        self.page_table_SP: NDArray[np.int32] = np.zeros(
            (max_running, max_pages_per_sequence), np.int32
        )
        self._on_begin, self.on_end, self._save, self._restore, self._clock = (
            on_begin,
            on_end,
            save,
            restore,
            clock,
        )
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()  # by id, the next one first
        self._running: list[Sequence] = []  # in order of admission
        self._slots = deque(
            range(max_running)
        )  # the one free for longest is taken first: on a GPU its text may still be drafted from
        self._by_id: dict[str, Sequence] = {}
        self._deadlines = Deadlines(self._by_id)
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    # -- submit and end ------------------------------------------------------------------------------------------

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue a batch, all or none. `InvalidRequest` if one could never run or its id is in use."""
        batch = list(sequences)
        room = min(self.pool.pages, self.page_table_SP.shape[1]) * self.pool.page_size
        for sequence in batch:
            need = sequence.length + sequence.remaining
            if need > room:
                raise InvalidRequest(
                    f"request {sequence.id}: prompt of {sequence.prompt_len} plus max_tokens {sequence.request.sampling.max_tokens} "
                    f"needs {need} positions, this server holds {room}; lower max_tokens or start it with more pages"
                )
            if sequence.id in self._by_id:
                raise InvalidRequest(
                    f"request id {sequence.id!r} is already in use; ids must be unique while a request runs"
                )
        for sequence in batch:
            sequence.arrived_s = self._clock()
            sequence.start_over(self.weight_version)
            self._by_id[sequence.id] = sequence
            self._waiting[sequence.id] = sequence
            self._deadlines.add(sequence)

    def abort(
        self, ids: Iterable[str], finish_reason: str = "abort", *, all: bool = False
    ) -> list[StepOutput]:
        """End these sequences (or all) with what they have; unknown ids have ended already."""
        chosen = [self._by_id[i] for i in (list(self._by_id) if all else ids) if i in self._by_id]
        return [self._end(sequence, finish_reason) for sequence in chosen]

    def fail(self, error: TltError) -> list[StepOutput]:
        """End all sequences with this error."""
        return [
            self._end(sequence, "error", error=(error.code, error.message))
            for sequence in list(self._by_id.values())
        ]

    def expire(self) -> list[StepOutput]:
        """End every sequence whose deadline has passed, running or waiting, and every one not begun
        when it should have been.
        """
        now, ended = self._clock(), []
        for sequence in self._deadlines.due(now):
            request = sequence.request
            error: TltError | None = None
            if request.deadline_s is not None and request.deadline_s <= now:
                error = DeadlineExceeded(
                    "the request's deadline passed before it finished; raise timeout_s or ask for fewer tokens"
                )
            elif not sequence.has_started:
                error = QueueTimeout(
                    "the engine did not begin this sequence within its queue_timeout_s, as others came first; send it "
                    "again later or raise queue_timeout_s"
                )
            if error is not None:
                ended.append(self._end(sequence, "error", error=(error.code, error.message)))
        return ended

    def _end(
        self,
        sequence: Sequence,
        finish_reason: str,
        stop_reason: int | None = None,
        error: tuple[str, str] | None = None,
        emission: Emission | None = None,
    ) -> StepOutput:
        if sequence.batch_slot >= 0:
            self._vacate(sequence)
        else:
            del self._waiting[sequence.id]
        del self._by_id[sequence.id]
        self.on_end(sequence)
        return self._output(sequence, emission or Emission(), finish_reason, stop_reason, error)

    # -- the next step -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._by_id

    @property
    def holds_kv(self) -> bool:
        """Some sequence has pages. None that waits has; what a spanning one saved lies elsewhere
        and serves nobody else.
        """
        return bool(self._running)

    @property
    def halted(self) -> bool:
        """No step is made, whatever waits."""
        return self.paused or self.frozen

    def next_batch(self) -> Batch | None:
        """The rows of the next step, pages reserved; None when nothing can run."""
        if self.halted:
            return None
        chunks = [
            chunk
            for sequence in list(self._running)
            if sequence.unlaunched <= 1 and (chunk := self._decode_chunk(sequence))
        ]
        room = self.room(len(chunks), self.max_rows)
        for sequence in list(self._running):
            if sequence.unlaunched > 1 and room > 0:
                chunks.append(self._prompt_chunk(sequence, room))
                room -= chunks[-1].end - chunks[-1].start
        running = len(self._running)
        while room > 0 and (admitted := self._admit()):
            chunks.append(self._prompt_chunk(admitted, room))
            room -= chunks[-1].end - chunks[-1].start
        if len(self._running) > running:
            self._on_begin([sequence.id for sequence in self._running])
        return Batch(chunks, self.weight_version) if chunks else None

    def launched(self, batch: Batch, depth: int) -> None:
        """The batch is on its way, with draft trees of at most this depth; `commit` is told of it
        later, in order.
        """
        for chunk in batch.chunks:
            chunk.launch(depth)

    def _decode_chunk(self, sequence: Sequence) -> Chunk | None:
        if sequence.sure and (sequence.sure >= sequence.remaining or sequence.by_host):
            return None  # what is in flight ends it, or has to be seen first
        while sequence.batch_slot >= 0:
            root_end = min(sequence.length + sequence.ahead, sequence.length + sequence.remaining)
            if self._reserve(sequence, root_end):
                self._reserve(
                    sequence, min(root_end + self.lookahead, sequence.length + sequence.remaining)
                )
                return Chunk(
                    sequence, sequence.length + sequence.ahead - 1, sequence.length + sequence.ahead
                )
            self._preempt(self._running[-1])
        return None

    @staticmethod
    def _prompt_chunk(sequence: Sequence, room: int) -> Chunk:
        return Chunk(sequence, sequence.launched, min(sequence.length, sequence.launched + room))

    def _reserve(self, sequence: Sequence, positions: int) -> bool:
        need = -(-positions // self.pool.page_size) - len(sequence.pages)
        if need > 0:
            pages = self.pool.allocate(need)
            if pages is None:
                return False
            start = len(sequence.pages)
            sequence.pages.extend(pages)
            self.page_table_SP[sequence.batch_slot, start : start + need] = pages
        return True

    def _admit(self) -> Sequence | None:
        """The oldest waiting sequence whose pages fit and whose prefix no running sibling is just
        computing.
        """
        if not self._slots:
            return None
        pending = self._pending_keys()
        for sequence in self._waiting.values():
            if self.holding and not sequence.has_started:
                continue
            saved = sequence.saved
            # prompt log-probs need every prompt row, once: they go out with the first token
            reuse = saved is None and (
                sequence.request.sampling.prompt_logprobs is None or sequence.output_len > 0
            )
            keys = sequence.page_keys((sequence.length - 1) // self.pool.page_size) if reuse else []
            pages = self.pool.match(keys)
            if len(pages) < len(keys) and keys[len(pages)] in pending:
                self.pool.release(pages)
                continue
            need = -(-sequence.length // self.pool.page_size) - len(pages)
            if need > self.pool.available - (
                len(self._running) if self._running else 0
            ):  # leave a page for each that runs
                self.pool.release(pages)
                return None
            del self._waiting[sequence.id]
            self._running.append(sequence)
            sequence.batch_slot = self._slots.popleft()
            sequence.pages, sequence.published = pages, len(pages)
            sequence.computed = sequence.launched = len(pages) * self.pool.page_size
            self.page_table_SP[sequence.batch_slot, : len(pages)] = pages
            self._reserve(sequence, sequence.length)
            if saved is not None:
                self._restore(saved.kv, sequence.pages)
                sequence.computed, sequence.saved = saved.computed, None
                sequence.launched = sequence.computed
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            if sequence.queued_s is None:
                sequence.queued_s = self._clock() - sequence.arrived_s
            return sequence
        return None

    def _pending_keys(self) -> set[PageKey]:
        size = self.pool.page_size
        computing = [s for s in self._running if not s.decoding and s.shares]
        return {
            key for s in computing for key in s.page_keys((s.length - 1) // size)[s.published :]
        }

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.mixed_version:  # no one version could compute its KV again
            pages = sequence.pages[: -(-sequence.computed // self.pool.page_size)]
            sequence.saved = SavedKV(self._save(pages), sequence.computed)
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def give_up_pages(self) -> None:
        """Whatever runs waits again, without KV, before what has not begun; no step may be in
        flight. Cached prefixes are forgotten.
        """
        for sequence in reversed(list(self._running)):
            self._preempt(sequence)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Whatever is admitted from now on computes its KV anew. What runs goes on with its own,
        and keeps it to itself.
        """
        for sequence in self._running:
            sequence.private = True  # its next pages are computed from what is forgotten here
        self.pool.clear_index()

    def _requeue(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._prompt_logprobs.pop(sequence.id, None)
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)

    def _vacate(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._slots.append(sequence.batch_slot)
        self.pool.release(sequence.pages)
        sequence.batch_slot, sequence.pages, sequence.computed, sequence.published = -1, [], 0, 0
        sequence.launched = sequence.sure = sequence.ahead = 0
        sequence.private = False
        sequence.epoch += 1

    # -- after a step --------------------------------------------------------------------------------------------

    def commit(self, batch: Batch, emissions: list[Emission]) -> list[StepOutput]:
        """Take over what the runner computed; `emissions[i]` belongs to `batch.chunks[i]`."""
        outputs = []
        for chunk, emission in zip(batch.chunks, emissions, strict=True):
            sequence = chunk.sequence
            if chunk.void:
                continue
            chunk.land()
            if emission.prompt_logprobs is not None:
                self._prompt_logprobs.setdefault(sequence.id, []).extend(emission.prompt_logprobs)
            if not chunk.samples:
                sequence.computed = chunk.end
                self._publish(sequence)
                continue
            if emission.error is not None:
                self.pool.withdraw(sequence.pages)  # where its KV went wrong is not known
                outputs.append(
                    self._end(
                        sequence, "error", error=(emission.error.code, emission.error.message)
                    )
                )
                continue
            emission.accepted = max(
                0, len(emission.tokens) - 1
            )  # none where only the prompt was wanted
            finish_reason, stop_reason = self._truncate(sequence, emission)
            emission.weight_version = batch.weight_version if emission.tokens else ""
            sequence.append(emission.tokens)
            sequence.computed = sequence.length - 1
            sequence.launched = sequence.length if sequence.sure else sequence.computed
            self._publish(sequence)
            if finish_reason:
                outputs.append(self._end(sequence, finish_reason, stop_reason, emission=emission))
            else:
                outputs.append(self._output(sequence, emission))
        return outputs

    def _truncate(self, sequence: Sequence, emission: Emission) -> tuple[str | None, int | None]:
        """Cut the emission behind the first stop token or at max_tokens; say how the sequence ends,
        if it does.
        """
        stops, room = sequence.state.stop_ids, sequence.remaining
        stopped = next(
            (i for i, token in enumerate(emission.tokens[:room]) if token in stops), None
        )
        if stopped is None and len(emission.tokens) < room:
            return None, None
        kept = room if stopped is None else stopped + 1
        for values in (
            emission.tokens,
            emission.logprobs,
            emission.raw_logprobs,
            emission.top_logprobs,
        ):
            if values is not None:
                del values[kept:]
        return ("length", None) if stopped is None else ("stop", emission.tokens[stopped])

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.page_size
        if sequence.shares and full > sequence.published:
            for page, key in list(zip(sequence.pages, sequence.page_keys(full), strict=False))[
                sequence.published : full
            ]:
                self.pool.publish(page, key)
            sequence.published = full

    def _output(
        self,
        sequence: Sequence,
        emission: Emission,
        finish_reason: str | None = None,
        stop_reason: int | None = None,
        error: tuple[str, str] | None = None,
    ) -> StepOutput:
        first = sequence.output_len == len(emission.tokens)
        return StepOutput(
            id=sequence.id,
            token_ids=emission.tokens,
            logprobs=emission.logprobs,
            raw_logprobs=emission.raw_logprobs,
            top_logprobs=emission.top_logprobs,
            prompt_logprobs=self._prompt_logprobs.pop(sequence.id, None),
            cached_tokens=(sequence.cached_tokens or 0) if first else 0,
            queued_s=(sequence.queued_s or 0.0) if first else 0.0,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            weight_version=emission.weight_version,
            drafted=emission.drafted,
            accepted=emission.accepted,
        )

    # -- a new weight version ------------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """Sequences that a version has computed something of."""
        return sum(s.has_started for s in self._by_id.values())

    def change_version(self, version: str, in_flight: InFlight) -> list[StepOutput]:
        """Every step from now on is computed by `version`; returns what ends of it.

        `continue` keeps the KV of what decodes. `recompute` drops all KV: the same tokens go on as
        if this version had read them. `abort` ends what has begun with what it has. `drain` has
        waited until nothing has. Whatever has no complete KV (a prompt half read, a preempted
        sequence whose KV was not saved) starts over under this version in every mode.
        """
        self.weight_version = version
        ended = (
            [self._end(s, "abort") for s in list(self._by_id.values()) if s.has_started]
            if in_flight == "abort"
            else []
        )
        for sequence in reversed(
            [s for s in self._running if in_flight == "recompute" or not s.decoding]
        ):
            self._requeue(sequence)
        for sequence in self._waiting.values():
            if in_flight == "recompute":
                sequence.saved = None
            if sequence.saved is None:
                sequence.start_over(version)
        for sequence in self._running:
            sequence.mixed_version = True
        return ended

    # -- looking in ----------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "pages_free": self.pool.available,
            "pages_cached": self.pool.cached,
            "preemptions": self.preemptions,
            "spanning": sum(s.mixed_version for s in self._by_id.values()),
        }

    def check(self) -> None:
        """Assert every invariant; called by the property tests after each operation."""
        self.pool.check([s.pages for s in self._running])
        self._deadlines.check()
        assert sorted([*self._slots, *(s.batch_slot for s in self._running)]) == list(
            range(self.max_running)
        ), "slots leak"
        assert {s.id for s in self._running} | self._waiting.keys() == set(self._by_id), (
            "a sequence is lost"
        )
        assert len(self._running) + len(self._waiting) == len(self._by_id), (
            "a sequence stands in two places"
        )
        for s in self._running:
            assert 0 <= s.computed < s.length and s.computed <= s.capacity, (
                f"{s.id}: computed {s.computed}, capacity {s.capacity}"
            )
            assert 0 <= s.sure <= s.ahead and bool(s.sure) == bool(s.ahead), (
                f"{s.id}: {s.sure} to {s.ahead} tokens are in flight"
            )
            assert s.computed <= s.launched <= s.length, (
                f"{s.id}: launched {s.launched}, computed {s.computed} of {s.length}"
            )
            assert self.page_table_SP[s.batch_slot, : len(s.pages)].tolist() == s.pages, (
                f"{s.id}: page table differs"
            )
        for s in self._waiting.values():
            assert s.batch_slot < 0 and not s.pages and s.computed == 0 and not s.private, (
                f"{s.id} waits but holds something"
            )
