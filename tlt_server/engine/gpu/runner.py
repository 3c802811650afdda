"""The GPU runner: uploads the scheduler's decisions, launches draft and extend passes, and reads
results one step late.

`launch` costs the host one upload and a few graph launches and never waits for the step that it
launches; `collect` reads the previous step. The device knows lengths, positions and ends of
sequences first, so a step can follow one whose outcome the host has not seen. Reports about tokens
are computed after the step (`reports.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tlt_kernels.filters import Filters
from tlt_kernels.gpu.accept import EntryOutcomes, fields
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_kernels.gpu.upload import NO_EDITS, Edits, Upload
from tlt_server.engine.gpu.flight import Flight, entries_of, newest_tokens
from tlt_server.engine.gpu.link import ALONE, StepWaits
from tlt_server.engine.gpu.memory.hidden_states import StateCapture
from tlt_server.engine.gpu.orders import (
    FinishStep,
    ForgetTexts,
    RecordStep,
    RenewTable,
    RunStep,
    TakeOver,
    UploadWords,
    WriteTable,
)
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.start.preparing import record
from tlt_server.engine.gpu.steps.drafts import DraftKey, drafters_of
from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable
from tlt_server.engine.gpu.steps.extend import ExtendKey, StructuredExtend
from tlt_server.engine.gpu.steps.reports import REHEARSED_KEYS, AskedReports, Reporter
from tlt_server.engine.gpu.steps.ring import PinnedBuffer, PinnedRing
from tlt_server.engine.gpu.steps.structured import StructureMasks
from tlt_server.engine.gpu.steps.texts import SentText, Texts
from tlt_server.engine.gpu.steps.tree_samples import TreeSample, TreeSampler, read
from tlt_server.engine.ranks.orders import NO_RANKS, RankOrders
from tlt_server.engine.runner import NOT_FINITE, Finished
from tlt_server.engine.schedule.batch import Batch, Chunk
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import NotFinite
from tlt_server.wire.records import Cycle, Strategy
from tlt_server.wire.tree_limits import MAX_ROWS

RING = 8  # uploads, and outcomes, that may be on their way


class Held(NamedTuple):
    """The sequence in a batch slot of the device."""

    sequence: Sequence
    epoch: int
    pages: int


class Writing(NamedTuple):
    """An upload that is being filled."""

    upload: Upload
    buffer: PinnedBuffer


class GpuRunner:
    def __init__(
        self,
        passes: Passes,
        texts: Texts,
        *,
        capture: StateCapture | None = None,
        ranks: RankOrders = NO_RANKS,
        waits: StepWaits = ALONE,
    ) -> None:
        """`capture`: takes the states of recorded sequences; None: no capture. `ranks`: the worker
        ranks, which get each order before this rank acts.
        """
        self.passes, self.state, self.graphs = passes, passes.state, passes.graphs
        self.shapes, self.stream, self.ranks, self._waits = (
            passes.shapes,
            passes.stream,
            ranks,
            waits,
        )
        self.learns = True
        state, pinned = self.state, passes.pinned
        wait = waits.wait
        self._uploads = PinnedRing(RING, state.layout.size, pinned=pinned, wait=wait)
        entries = self.shapes.max_running + state.layout.chunks
        words = entries * fields(state.depth) + waits.words
        self._outcomes = PinnedRing(RING, words, pinned=pinned, wait=wait)
        self._trees = TreeSampler(RING, pinned=pinned)
        self._masks = StructureMasks(state, pinned=pinned, wait=wait)
        self._reporter = Reporter(PinnedRing(RING, entries, pinned=pinned), state.upload_U.device)
        self.texts = texts
        self._capture = capture
        self._held: dict[int, Held] = {}
        self._flights: deque[Flight] = deque()
        self._writing: Writing | None = None  # what the device has not been told yet
        self._last_batch: tuple[list[int], list[tuple[int, int, int]]] | None = None

    @property
    def tables(self) -> dict[str, DeviceTable]:
        """Return the tables of drafters and of branches."""
        found: dict[str, DeviceTable] = {}
        for drafter in self.passes.drafters.values():
            found |= drafter.tables(self.stream)
        for name, table in found.items():
            self._tell_others(name, table)
        return found

    def _tell_others(self, name: str, table: DeviceTable) -> None:
        """Repeat each change of a table on the other ranks."""
        table.on_write = lambda acceptance_K, hits_K, trials_K: self.ranks.order(
            WriteTable(name, acceptance_K.view(np.int32), hits_K, trials_K)
        )
        table.on_renew = lambda: self.ranks.order(RenewTable(name))

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def gauges(self) -> dict[str, float]:
        gauges = dict(self.texts.gauges())
        for drafter in self.passes.drafters.values():
            gauges |= drafter.gauges()
        return gauges

    def forget(self) -> None:
        """Stop drafting from the text of ended sequences, except those whose prompt is running."""
        slots = self.texts.forget()
        self.ranks.order(ForgetTexts(slots))
        self.passes.forget(slots)

    def copy_all_trees(self) -> None:
        """Return whole trees from every step from now on, with tokens and cells, for a recording to
        keep.
        """
        pinned = self.passes.pinned
        self._trees = TreeSampler(RING, pinned=pinned, every=1, most=MAX_NODES, detailed=True)

    def launch(self, batch: Batch, strategy: Strategy) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._launch(batch, strategy)

    def collect(self, *, busy: bool) -> Finished | None:
        """Return the oldest step in flight; while `busy`, only if a newer one has been launched
        since then.
        """
        self.ranks.check()
        if len(self._flights) <= int(busy):
            return None
        flight = self._flights.popleft()
        outcome = flight.outcomes(self.state.depth)
        if self._capture and flight.captured:
            self._capture.collected(flight.captured)
        if flight.reports:
            flight = flight._replace(reports=self._reporter.read(flight.reports))
        emissions = {
            id(work): self._emission(outcome, e, work, flight) for e, work in flight.entries
        }
        decoding = len(flight.decoding)
        # Entries that failed, or had ended before, are no decodes.
        gave_B = outcome.count_E[:decoding] > 0
        verified = int(outcome.verified_E[:decoding][gave_B].sum())
        cycle = Cycle(
            context=flight.batch.context,
            strategy=flight.strategy,
            rows=flight.key.decode_rows + flight.key.prompt_rows,
            accepted=tuple(outcome.accepted_E[:decoding][gave_B].tolist()),
            drafted=verified,
        )
        failed = bool(outcome.broken_E[:decoding].any())  # its nodes are among the most likely
        trees = read(flight.trees, verified) if flight.trees and not failed else None
        answers = [emissions[id(work)] for work in flight.batch.chunks]
        return Finished(flight.batch, answers, cycle, trees)

    def record(self, key: DraftKey | ExtendKey) -> None:
        """Capture a step of this key on all ranks, between two steps. No request may run if the
        capture needs a run.
        """
        with self.at_rest():
            if isinstance(key, DraftKey):
                self.ranks.order(RecordStep(key, None))
            else:
                self.ranks.order(RecordStep(None, key))
            record(self.passes, key)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Give the passes that the block launches dead rows."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._upload([], [])
            yield

    def rehearse(self) -> None:
        """Launch the work that follows steps, so that its kernels are loaded before a trainer may
        hold the GPU.
        """
        self.passes.forget([])
        for key in REHEARSED_KEYS:
            self._reporter.rehearse(self.passes.extend(key))

    def _launch(self, batch: Batch, strategy: Strategy) -> None:
        decoding = [work for work in batch.chunks if work.decodes]
        prompts = [work for work in batch.chunks if not work.decodes]
        chunks = [(work.sequence.batch_slot, work.start, work.end - work.start) for work in prompts]
        for work in batch.chunks:
            self._hold(work)
        self._upload([work.sequence.batch_slot for work in decoding], chunks)

        strategy, name, key = self.shapes.shape(batch.context, strategy)
        passes, extend = self.passes, self.passes.extend(key)
        capped = name is not None and any(_limits_rows(work.sequence) for work in decoding)
        learns = self.learns and not key.plain
        entries = entries_of(decoding, prompts, key.batch)
        asked = AskedReports.of(entries, key.decode_rows)
        step = RunStep(name, capped, key, learns, asked.reported)
        self.ranks.order(step)
        drafted = passes.run_draft(name, capped=capped) if name else None
        passes.select(extend, drafted)
        trees: TreeSample | None = None
        if drafted:
            trees = self._trees.launch(drafted.nodes, len(decoding), drafted.own_columns)
        captured = None
        if self._capture:
            captured = self._capture.choose(batch.chunks, self.state.depth if drafted else 0)
        if isinstance(extend, StructuredExtend):
            verified = self._masks.copy_trees(extend)
            passes.run_extend(extend)
            newest = newest_tokens(self._flights, self.state.depth)
            words = self._masks.upload(extend, verified, entries, newest)
            self.ranks.order(FinishStep(words, step))
            passes.run_second(extend)
        else:
            passes.run_extend(extend)
        if self._capture and captured:
            self._capture.launched(captured)
        if drafted and learns:
            passes.learn(extend, drafted)
        buffer = self._outcomes.take()
        used = extend.outcome_EF.numel()
        buffer.tensor[:used].copy_(extend.outcome_EF.view(-1), non_blocking=True)
        reports = self._reporter.launch(extend, asked)
        outcome = self._waits.copy_sums(buffer)
        buffer.mark()
        self._flights.append(
            Flight(batch, strategy, key, decoding, prompts, outcome, reports, trees, captured)
        )

    def _hold(self, work: Chunk) -> None:
        """Upload a started sequence, and the pages that a batch slot has gained."""
        sequence = work.sequence
        held = self._held.get(sequence.batch_slot)
        if held is None or held.sequence is not sequence or held.epoch != sequence.epoch:
            self._begin(sequence, work.start)
        elif len(sequence.pages) > held.pages:
            self._change(
                lambda upload: upload.extend_pages(
                    sequence.batch_slot, held.pages, sequence.pages[held.pages :]
                )
            )
        self._held[sequence.batch_slot] = Held(sequence, sequence.epoch, len(sequence.pages))

    def _begin(self, sequence: Sequence, start: int) -> None:
        sampling, request, size = (
            sequence.request.sampling,
            sequence.request,
            self.state.cache.page_size,
        )
        shared = self.texts.begin(sequence)
        for text in shared.sent:
            self._change(partial(_send_text, text))
        limits = request.draft_limits
        reads_page = self.state.page_hint_PH is not None and start > 0 and start % size == 0
        self._change(
            lambda upload: upload.admit(
                sequence.batch_slot,
                sequence.tokens,
                sequence.pages,
                limit=sequence.length + sequence.remaining,
                seed=request.seed,
                temperature=sampling.temperature,
                filters=Filters.of(sampling),
                stop_ids=sorted(sequence.state.stop_ids)[
                    : self.state.layout.stops
                ],  # the host sees to the others, a step later
                drafters=drafters_of(limits),
                max_depth=limits.max_depth if limits else 0,
                max_rows=limits.max_rows if limits else 1,
                group=shared.group,
                first=shared.first,
                hint_page=sequence.pages[start // size - 1] if reads_page else -1,
                edits=_edits_of(sequence),
                adapter=sequence.slot,
            )
        )

    def _change(self, write: Callable[[Upload], bool]) -> None:
        """Add a change to the upload; if it is full, apply its content first."""
        if not write(self._open().upload):
            self._send()
            self.ranks.order(TakeOver())
            self.passes.take_over()
            assert write(self._open().upload), "one sequence does not fit an empty upload"

    def _open(self) -> Writing:
        if self._writing is None:
            buffer = self._uploads.take()
            self._writing = Writing(Upload(self.state.layout, buffer.array), buffer)
            self._writing.upload.begin()
        return self._writing

    def _send(self) -> None:
        upload, buffer = self._open()
        self.ranks.order(UploadWords(buffer.array[: upload.used]))
        self.passes.send(buffer, upload.used)
        self._writing, self._last_batch = None, None

    def _upload(self, batch_slots: list[int], chunks: list[tuple[int, int, int]]) -> None:
        """Upload the step's batch, unless the device already has it."""
        if self._writing is None and self._last_batch == (batch_slots, chunks):
            return
        self._open().upload.batch(batch_slots, chunks)
        self._send()
        self._last_batch = batch_slots, chunks

    @staticmethod
    def _emission(outcome: EntryOutcomes, entry: int, work: Chunk, flight: Flight) -> Emission:
        emission = Emission()
        if work.samples:
            if outcome.broken_E[entry]:
                return Emission(error=work.sequence.state.error or NotFinite(NOT_FINITE))
            count = int(outcome.count_E[entry])
            emission = Emission(
                tokens=outcome.token_EA[entry, :count].tolist(),
                logprobs=outcome.logprob_EA[entry, :count].tolist(),
                drafted=int(outcome.verified_E[entry]),
                accepted=int(outcome.accepted_E[entry]),
                own_drafted=int(outcome.own_verified_E[entry]),
                own_accepted=int(outcome.own_accepted_E[entry]),
            )
        if flight.reports:
            flight.reports.add_to(emission, entry, work)
        return emission


def _send_text(text: SentText, upload: Upload) -> bool:
    return upload.keep_text(*text)


def _limits_rows(sequence: Sequence) -> bool:
    limits = sequence.request.draft_limits
    return limits is not None and limits.max_rows < MAX_ROWS


def _edits_of(sequence: Sequence) -> Edits:
    """Return the logit edits of a sequence in the form of an admission."""
    state = sequence.state
    if not state.edits:
        return NO_EDITS
    return Edits(
        *state.penalties,
        prompt=sequence.prompt_len,
        masked_to=state.masked_to,
        bias_ids=state.bias_ids,
        bias=state.bias,
        mask_ids=state.mask_ids,
        allowed_ids=state.allowed_ids,
    )
