"""The reader of rows that captures states on a GPU: as part of each extend pass, the rows that
became text of recorded sequences are copied into a ring on the device.

The host chooses batch slots before a step and, one step late, learns how much of the ring the step
has filled; `pages.py` takes that part. A step for which the ring may have no room is not
captured. Without a trainer that wants features none of this exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tlt_kernels.gpu.hidden_states import StateRing, claim, copy_states
from tlt_kernels.gpu.tensors import KeptRows, RowTable
from tlt_server.engine.devices.sizing import MIB
from tlt_server.engine.gpu.memory.budget import MemoryPlan
from tlt_server.engine.gpu.memory.hidden_states.pages import PageStates
from tlt_server.engine.gpu.steps.ring import PinnedBuffer, PinnedRing
from tlt_server.engine.record.hidden_states import describe_states
from tlt_server.engine.schedule.batch import Chunk
from tlt_server.models import Forward
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.placement import Placement


class CapturedStep(NamedTuple):
    """A step whose rows are captured, until its outcome is known."""

    head: PinnedBuffer  # slot of the ring after the rows of the step
    rows: int  # at most
    pages: dict[int, tuple[Chunk, list[int]]]  # by batch slot


class StateCapture:
    def __init__(self, states: PageStates, *, steps: int, pinned: bool) -> None:
        """`steps`: those that may be in flight."""
        self.states, self._ring = states, states.ring
        self._flags = PinnedRing(steps, len(self._ring.chosen_Q), pinned=pinned)
        self._heads = PinnedRing(steps, 1, pinned=pinned)
        self._chosen: frozenset[int] = frozenset()  # batch slots, as the device knows them
        self._in_flight = 0  # rows of steps in flight, at most

    def read_rows(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
        """Copy what has become text, as part of every extend pass."""
        copy_states(
            claim(rows, kept, self._ring), forwarded.features_RF, forwarded.hidden_RH, self._ring
        )

    def choose(self, chunks: Iterable[Chunk], depth: int) -> CapturedStep | None:
        """Tell the device whose rows the next step captures; None where it captures none. `depth`:
        of its draft trees.
        """
        wanted = [chunk for chunk in chunks if chunk.sequence.trace is not None]
        rows = sum(chunk.end - chunk.start + (depth if chunk.decodes else 0) for chunk in wanted)
        if rows > self.states.room - self._in_flight:
            wanted = []
        chosen = frozenset(chunk.sequence.batch_slot for chunk in wanted)
        if chosen != self._chosen:
            flags = self._flags.take()
            flags.array[:] = 0
            flags.array[[*chosen]] = 1
            self._ring.chosen_Q.copy_(flags.tensor, non_blocking=True)
            flags.mark()
            self._chosen = chosen
        if not wanted:
            return None
        self._in_flight += rows
        pages = {c.sequence.batch_slot: (c, [*c.sequence.pages]) for c in wanted}
        return CapturedStep(self._heads.take(), rows, pages)

    def launched(self, step: CapturedStep) -> None:
        """Queue what tells the end of the step's rows; the step has just been launched."""
        step.head.tensor.copy_(self._ring.head, non_blocking=True)
        step.head.mark()

    def collected(self, step: CapturedStep) -> None:
        """Take the rows of a step that is over, but those of sequences that have left meanwhile."""
        step.head.wait()
        self._in_flight -= step.rows
        pages = {slot: own for slot, (chunk, own) in step.pages.items() if not chunk.void}
        self.states.drain(int(step.head.array[0]), pages)


def make_states(
    plan: MemoryPlan, model: GpuDecoder, placement: Placement, *, streams: bool
) -> PageStates | None:
    """Return the source of states; None where no trainer wants features, or nothing reads them."""
    if not plan.state_slots:
        return None
    settings, device = plan.settings, placement.device
    ring = StateRing.allocate(
        plan.state_slots,
        model.feature_width + model.hidden_size,
        settings.max_running + 1,
        dtype=placement.dtype,
        device=str(device),
    )
    return PageStates(
        ring,
        feature_width=model.feature_width,
        hidden_width=model.hidden_size,
        bound=settings.feature_bytes,
        stream=torch.cuda.Stream(device) if streams else None,
    )


def describe(plan: MemoryPlan) -> str:
    ring = plan.state_slots * plan.needs.per_state
    return (
        f"{describe_states(plan.needs.per_state, plan.settings)}, {ring // MIB} MiB of the GPU, "
        f"{ring // MIB} MiB pinned and {plan.settings.feature_bytes // MIB} MiB more of the host"
    )
