"""The passes of one GPU, by key, and the graphs that replay them: everything that a step launches.

Rank 0's runner decides what to launch; worker ranks follow its orders. Nothing here knows about
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from tlt_kernels.gpu.caps import cap_rows
from tlt_kernels.gpu.upload import apply
from tlt_server.attention.gpu import GpuAttention
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.steps.buckets import Shapes
from tlt_server.engine.gpu.steps.drafts import DraftKey, DraftPass, GpuDrafter, RowReader
from tlt_server.engine.gpu.steps.extend import (
    Extend,
    ExtendKey,
    SecondHalf,
    StructuredExtend,
    graphs_of,
)
from tlt_server.engine.gpu.steps.ring import PinnedBuffer
from tlt_server.engine.gpu.steps.state import DeviceState


class Rehearsed(NamedTuple):
    """Passes to rehearse together: a draft with the launches between it and each extend pass, or
    extend passes alone.
    """

    draft: DraftKey | None
    extends: tuple[ExtendKey, ...]


class Passes:
    def __init__(
        self,
        state: DeviceState,
        attention: GpuAttention,
        drafters: dict[str, GpuDrafter],
        graphs: GraphPool,
        *,
        shapes: Shapes,
        stream: torch.cuda.Stream | None,
        readers: Sequence[RowReader] = (),
        run_first: bool = False,
    ) -> None:
        """`readers`: read the rows' states, like drafters. `run_first`: run each pass once before
        its capture, because vendor libraries initialize in a run.
        """
        self.state, self.drafters, self.graphs, self.shapes = state, drafters, graphs, shapes
        self.stream, self._attention = stream, attention
        self.run_first = run_first
        self._readers: list[RowReader] = [*drafters.values(), *readers]
        self.extends: dict[ExtendKey, Extend] = {}
        self._drafts: dict[DraftKey, DraftPass] = {}

    @property
    def pinned(self) -> bool:
        return self.state.upload_U.device.type == "cuda"

    def of(self, key: DraftKey | ExtendKey) -> DraftPass | Extend:
        return self.extend(key) if isinstance(key, ExtendKey) else self.draft(key)

    def extend(self, key: ExtendKey) -> Extend:
        """Return the pass of this key. The buffers of a pass that is never captured last for one
        step, since such passes come in too many sizes to keep.
        """
        extend = self.extends.get(key)
        if extend is None:
            kind = StructuredExtend if key.structured else Extend
            extend = kind(key, self.state, self._attention, self._readers)
            if self.shapes.keeps(key):
                self.extends[key] = extend
        return extend

    def draft(self, key: DraftKey) -> DraftPass:
        if key not in self._drafts:
            self._drafts[key] = self.drafters[key.drafter].draft_pass(key)
        return self._drafts[key]

    @property
    def made(self) -> set[DraftKey | ExtendKey]:
        """Return the keys of the passes whose buffers are kept."""
        return {*self.extends, *self._drafts}

    def drop(self, keys: Iterable[DraftKey | ExtendKey]) -> None:
        """Free the buffers of these passes, except those that a graph holds."""
        for key in keys:
            if not any(graph in self.graphs for graph in graphs_of(key)):
                if isinstance(key, ExtendKey):
                    self.extends.pop(key, None)
                else:
                    self._drafts.pop(key, None)

    def keeps(self, key: DraftKey | ExtendKey) -> bool:
        return isinstance(key, DraftKey) or self.shapes.keeps(key)

    def send(self, buffer: PinnedBuffer, used: int) -> None:
        """Queue the upload of a buffer's first words."""
        self.state.upload_U[:used].copy_(buffer.tensor[:used], non_blocking=True)
        buffer.mark()

    def take_over(self) -> None:
        """Apply the upload, unless it has been applied."""
        state = self.state
        apply(state.upload_U, state.layout, state.batch_slots, state.page_hint_PH)

    def work(self, part: DraftPass | Extend) -> Callable[[], None]:
        """Return the callable to run or capture. The first pass of a step also applies the upload,
        which saves a launch.
        """
        if isinstance(part, Extend) and not part.key.plain:
            return part.run

        def run() -> None:
            self.take_over()
            part.run()

        return run

    def run_draft(self, key: DraftKey, *, capped: bool) -> DraftPass:
        """Draft, and cut the trees of requests with a row limit."""
        drafted = self.draft(key)
        self.graphs.run(key, self.work(drafted), keep=True)
        if capped:
            self.cap_rows(key)
        return drafted

    def select(self, extend: Extend, drafted: DraftPass | None) -> None:
        """Lay out the rows that a pass verifies. A plain pass does so itself, unless structured
        outputs need the layout earlier.
        """
        if drafted is not None and not extend.key.plain:
            extend.select(drafted.nodes, drafted.own_columns)
        elif extend.key.structured and extend.key.plain:
            self.take_over()
            extend.select(None)

    def run_extend(self, extend: Extend) -> None:
        self.graphs.run(extend.key, self.work(extend), keep=self.shapes.keeps(extend.key))

    def run_second(self, extend: StructuredExtend) -> None:
        keep = self.shapes.keeps(extend.key)
        self.graphs.run(SecondHalf(extend.key), extend.run_second, keep=keep)

    def cap_rows(self, key: DraftKey) -> None:
        state = self.state
        cap_rows(state.batch_slot_B(key.batch), state.batch_slots, self.draft(key).nodes)

    def learn(self, extend: Extend, drafted: DraftPass) -> None:
        self.drafters[drafted.key.drafter].observe(
            extend.trees, extend.kept, drafted.nodes, extend.rows, extend.key.decode_rows
        )

    def forget(self, slots: Sequence[int]) -> None:
        """Stop drafting from the text in these slots."""
        slot_N = torch.tensor(slots, dtype=torch.int64).to(self.state.upload_U.device)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.state.batch_slots.group_Q[slot_N] = -1

    def run_empty(self, key: DraftKey | ExtendKey) -> None:
        """Run a pass of dead rows, and capture it if it is worth a graph."""
        part = self.of(key)
        if isinstance(part, Extend) and not part.key.plain:
            part.select(None)
        self.graphs.run(key, self.work(part), keep=self.keeps(key))
        if isinstance(key, DraftKey):
            self.cap_rows(key)
        elif isinstance(part, StructuredExtend):
            self.run_second(part)
