"""The GPU runner: tells the device what the scheduler decided, launches draft and extend passes,
takes results in a step late.

`launch` costs the host one upload and a few graph launches and never waits for the step it
launches; `collect` takes in the step before. Lengths, positions and whether a sequence has ended
are known to the device first, so a step can follow one whose outcome the host has not seen. What is
only reported about tokens is computed after the step (`reports.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from tlt_kernels.gpu.accept import EntryOutcomes, fields
from tlt_kernels.gpu.caps import cap_rows
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_kernels.gpu.upload import Upload, apply
from tlt_server.attention.gpu import GpuAttention
from tlt_server.engine.batch import Batch, Chunk, Emission
from tlt_server.engine.gpu.asked import edits_of, limits_rows
from tlt_server.engine.gpu.buckets import Shapes
from tlt_server.engine.gpu.capture import StateCapture
from tlt_server.engine.gpu.drafts import DraftKey, DraftPass, Follower, GpuDrafter, drafters_of
from tlt_server.engine.gpu.drafts.tables import DeviceTable
from tlt_server.engine.gpu.extend import Extend, ExtendKey, SecondHalf
from tlt_server.engine.gpu.flight import Flight, entries_of, newest_tokens
from tlt_server.engine.gpu.graphs import GraphPool
from tlt_server.engine.gpu.page_states import PageStates
from tlt_server.engine.gpu.reports import Reporter
from tlt_server.engine.gpu.ring import PinnedBuffer, PinnedRing
from tlt_server.engine.gpu.state import DeviceState
from tlt_server.engine.gpu.structured import StructureMasks
from tlt_server.engine.gpu.texts import SentText, Texts
from tlt_server.engine.gpu.tree_samples import TreeSample, TreeSampler, read
from tlt_server.engine.runner import NOT_FINITE, Finished
from tlt_server.engine.sequence import Sequence
from tlt_server.errors import EngineFailed
from tlt_server.records import Cycle, Strategy

RING = 8  # uploads, and outcomes, that may be on their way


class Held(NamedTuple):
    """The sequence that the device has in a batch slot."""

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
        state: DeviceState,
        attention: GpuAttention,
        drafters: dict[str, GpuDrafter],
        graphs: GraphPool,
        texts: Texts,
        *,
        shapes: Shapes,
        stream: torch.cuda.Stream | None,
        page_hint_PH: torch.Tensor | None,
        states: PageStates | None = None,
    ) -> None:
        """`states`: takes the states of recorded sequences; None: they are not captured."""
        self.state, self.graphs, self.shapes = state, graphs, shapes
        self.stream, self._attention, self._drafters = stream, attention, drafters
        self._page_hint_PH = page_hint_PH
        self.learns = True
        pinned = state.upload_U.device.type == "cuda"
        self._uploads = PinnedRing(RING, state.layout.size, pinned=pinned)
        entries = shapes.max_running + state.layout.chunks
        self._outcomes = PinnedRing(RING, entries * fields(state.depth), pinned=pinned)
        self._trees = TreeSampler(RING, pinned=pinned)
        self._pinned = pinned
        self._masks = StructureMasks(state, pinned=pinned)
        self._reporter = Reporter(PinnedRing(RING, entries, pinned=pinned), state.upload_U.device)
        self.texts = texts
        self._capture = StateCapture(states, steps=RING, pinned=pinned) if states else None
        self._held: dict[int, Held] = {}
        self._flights: deque[Flight] = deque()
        self._extends: dict[ExtendKey, Extend] = {}
        self._drafts: dict[DraftKey, DraftPass] = {}
        self._writing: Writing | None = None  # what the device has not been told yet
        self._last_batch: tuple[list[int], list[tuple[int, int, int]]] | None = None

    @property
    def tables(self) -> dict[str, DeviceTable]:
        """Return the tables of drafters, and those of the branches in their trees."""
        found: dict[str, DeviceTable] = {}
        for drafter in self._drafters.values():
            found |= drafter.tables(self.stream)
        return found

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def gauges(self) -> dict[str, float]:
        gauges = dict(self.texts.gauges())
        for drafter in self._drafters.values():
            gauges |= drafter.gauges()
        return gauges

    def forget(self) -> None:
        """Draft no more from the text of sequences that have ended, unless their prompt runs."""
        slots = torch.tensor(self.texts.forget(), dtype=torch.int64)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.state.batch_slots.group_Q[slots.to(self.state.upload_U.device)] = -1

    def copy_all_trees(self) -> None:
        """Give the whole trees of every step from now on, with tokens and cells, to be recorded."""
        self._trees = TreeSampler(RING, pinned=self._pinned, every=1, most=MAX_NODES, detailed=True)

    def launch(self, batch: Batch, strategy: Strategy) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._launch(batch, strategy)

    def collect(self, *, busy: bool) -> Finished | None:
        """Return the oldest step in flight; while `busy`, only if another was launched since."""
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
        verified = int(outcome.verified_E[: len(flight.decoding)].sum())
        cycle = Cycle(
            context=flight.batch.context,
            strategy=flight.strategy,
            rows=flight.key.decode_rows + flight.key.prompt_rows,
            accepted=tuple(int(a) for a in outcome.accepted_E[: len(flight.decoding)]),
            drafted=verified,
        )
        trees = read(flight.trees, verified) if flight.trees else None
        answers = [emissions[id(work)] for work in flight.batch.chunks]
        return Finished(flight.batch, answers, cycle, trees)

    def record(self, key: DraftKey | ExtendKey) -> None:
        """Run one key without a request, while none runs, and capture it."""
        with self.at_rest():
            self.run_empty(key)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Let the block launch passes of dead rows, while no request runs."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._upload([], [])
            yield

    def run_empty(self, key: DraftKey | ExtendKey) -> None:
        """Run a pass of dead rows, and capture it if that is worth it."""
        part = self.pass_of(key)
        if isinstance(part, Extend) and not part.key.plain:
            part.select(None)
        self.graphs.run(key, self.work(part), keep=self.keeps(key))
        if isinstance(key, DraftKey):
            self.cap_rows(key)
        elif isinstance(part, Extend) and key.structured:
            self._run_second(part)

    def rehearse_reports(self, key: ExtendKey) -> None:
        self._reporter.rehearse(self.extend_pass(key))

    def keeps(self, key: DraftKey | ExtendKey) -> bool:
        return isinstance(key, DraftKey) or self.shapes.keeps(key)

    def learn(self, extend: Extend, drafted: DraftPass) -> None:
        self._drafters[drafted.key.drafter].observe(
            extend.trees, extend.kept, drafted.nodes, extend.rows, extend.key.decode_rows
        )

    def _launch(self, batch: Batch, strategy: Strategy) -> None:
        decoding = [work for work in batch.chunks if work.decodes]
        prompts = [work for work in batch.chunks if not work.decodes]
        chunks = [(work.sequence.batch_slot, work.start, work.end - work.start) for work in prompts]
        for work in batch.chunks:
            self._hold(work)
        self._upload([work.sequence.batch_slot for work in decoding], chunks)

        strategy, name, key = self.shapes.step(
            len(decoding),
            strategy,
            sum(count for _, _, count in chunks),
            len(chunks),
            filtered=batch.context.filtered,
            edited=batch.context.edited,
            structured=batch.context.structured,
            adapted=batch.context.adapted,
        )
        extend = self.extend_pass(key)
        drafted: DraftPass | None = None
        trees: TreeSample | None = None
        if name:
            drafted = self.draft_pass(name)
            self.graphs.run(name, self.work(drafted), keep=True)
            if any(limits_rows(work.sequence) for work in decoding):
                self.cap_rows(name)
            if not key.plain:
                extend.select(drafted.nodes, drafted.own_columns)
            trees = self._trees.launch(drafted.nodes, len(decoding), drafted.own_columns)
        captured = None
        if self._capture:
            captured = self._capture.choose(batch.chunks, self.state.depth if drafted else 0)
        entries = entries_of(decoding, prompts, key.batch)
        if key.structured:
            if key.plain:  # the pass selects the same again
                self._take_over()
                extend.select(None)
            self._masks.copy_trees(extend)
        self.graphs.run(key, self.work(extend), keep=self.shapes.keeps(key))
        if key.structured:
            newest = newest_tokens(self._flights, self.state.depth)
            self._masks.upload(extend, entries, newest)
            self._run_second(extend)
        if self._capture and captured:
            self._capture.launched(captured)
        if drafted and self.learns and not key.plain:
            self.learn(extend, drafted)
        outcome = self._outcomes.take()
        outcome.tensor[: extend.outcome_EF.numel()].copy_(
            extend.outcome_EF.view(-1), non_blocking=True
        )
        reports = self._reporter.launch(extend, entries)
        outcome.mark()
        self._flights.append(
            Flight(batch, strategy, key, decoding, prompts, outcome, reports, trees, captured)
        )

    def _run_second(self, extend: Extend) -> None:
        keep = self.shapes.keeps(extend.key)
        self.graphs.run(SecondHalf(extend.key), extend.run_second, keep=keep)

    def _hold(self, work: Chunk) -> None:
        """Send a sequence that has started, and pages that a batch slot has got since."""
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
        reads_page = self._page_hint_PH is not None and start > 0 and start % size == 0
        self._change(
            lambda upload: upload.admit(
                sequence.batch_slot,
                sequence.tokens,
                sequence.pages,
                limit=sequence.length + sequence.remaining,
                seed=request.seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                top_k=sampling.top_k,
                stop_ids=sorted(sequence.state.stop_ids)[
                    : self.state.layout.stops
                ],  # the host sees to the others, a step later
                drafters=drafters_of(limits),
                max_depth=limits.max_depth if limits else 0,
                max_rows=limits.max_rows if limits else 1,
                group=shared.group,
                first=shared.first,
                hint_page=sequence.pages[start // size - 1] if reads_page else -1,
                edits=edits_of(sequence),
                adapter=sequence.slot,
            )
        )

    def _change(self, write: Callable[[Upload], bool]) -> None:
        """Put a change into the upload; what is in it goes first when there is no room."""
        if not write(self._open().upload):
            self._send()
            self._take_over()
            assert write(self._open().upload), "one sequence does not fit an empty upload"

    def _open(self) -> Writing:
        if self._writing is None:
            buffer = self._uploads.take()
            self._writing = Writing(Upload(self.state.layout, buffer.array), buffer)
            self._writing.upload.begin()
        return self._writing

    def _send(self) -> None:
        upload, buffer = self._open()
        used = upload.used
        self.state.upload_U[:used].copy_(buffer.tensor[:used], non_blocking=True)
        buffer.mark()
        self._writing, self._last_batch = None, None

    def _take_over(self) -> None:
        """Apply the upload, unless that has been done."""
        apply(self.state.upload_U, self.state.layout, self.state.batch_slots, self._page_hint_PH)

    def work(self, part: DraftPass | Extend) -> Callable[[], None]:
        """Return the callable to run or capture. The first pass of a step also applies the upload,
        which saves a launch.
        """
        if isinstance(part, Extend) and not part.key.plain:
            return part.run

        def run() -> None:
            self._take_over()
            part.run()

        return run

    def _upload(self, batch_slots: list[int], chunks: list[tuple[int, int, int]]) -> None:
        """Everything the step needs to be told, unless it is what the device was told last."""
        if self._writing is None and self._last_batch == (batch_slots, chunks):
            return
        self._open().upload.batch(batch_slots, chunks)
        self._send()
        self._last_batch = batch_slots, chunks

    def pass_of(self, key: DraftKey | ExtendKey) -> DraftPass | Extend:
        return self.extend_pass(key) if isinstance(key, ExtendKey) else self.draft_pass(key)

    def extend_pass(self, key: ExtendKey) -> Extend:
        """A pass that is never captured is made for its one step: there are too many sizes to keep
        their buffers.
        """
        extend = self._extends.get(key)
        if extend is None:
            followers: list[Follower] = [*self._drafters.values()]
            followers += [self._capture] if self._capture else []
            extend = Extend(key, self.state, self._attention, followers)
            if self.shapes.keeps(key):
                self._extends[key] = extend
        return extend

    def draft_pass(self, key: DraftKey) -> DraftPass:
        if key not in self._drafts:
            self._drafts[key] = self._drafters[key.drafter].draft_pass(key)
        return self._drafts[key]

    def cap_rows(self, key: DraftKey) -> None:
        """Cut the trees just drafted for requests that take few rows."""
        state = self.state
        cap_rows(state.batch_slot_B(key.batch), state.batch_slots, self.draft_pass(key).nodes)

    @staticmethod
    def _emission(outcome: EntryOutcomes, entry: int, work: Chunk, flight: Flight) -> Emission:
        emission = Emission()
        if work.samples:
            if outcome.broken_E[entry]:
                return Emission(error=work.sequence.state.error or EngineFailed(NOT_FINITE))
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
