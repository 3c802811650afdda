"""The row reader that captures hidden states on a GPU: each extend pass copies the rows that became
text of recorded sequences into a ring on the device.

The host chooses batch slots before a step and learns, one step late, how much of the ring the step
has filled; `pages.py` takes that part. A step that might overflow the ring is not captured. Nothing
of this exists unless a trainer uses features.
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
    """A step that captures rows, until its outcome is known."""

    head: PinnedBuffer  # slot of the ring after the rows of the step
    rows: int  # at most
    pages: dict[int, tuple[Chunk, list[int]]]  # by batch slot


class StateCapture:
    def __init__(self, states: PageStates, *, steps: int, pinned: bool) -> None:
        """`steps`: the number that may be in flight."""
        self.states, self._ring = states, states.ring
        self._flags = PinnedRing(steps, len(self._ring.chosen_Q), pinned=pinned)
        self._heads = PinnedRing(steps, 1, pinned=pinned)
        self._chosen: frozenset[int] = frozenset()  # batch slots, as the device knows them
        self._in_flight = 0  # rows of steps in flight, at most

    def read_rows(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
        """Copy the rows that became text; part of every extend pass."""
        copy_states(
            claim(rows, kept, self._ring), forwarded.features_RF, forwarded.hidden_RH, self._ring
        )

    def choose(self, chunks: Iterable[Chunk], depth: int) -> CapturedStep | None:
        """Upload which rows the next step captures. None if it captures none. `depth`: of its draft
        trees.
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
        """Queue the copy of the ring's head after the step that has just been launched."""
        step.head.tensor.copy_(self._ring.head, non_blocking=True)
        step.head.mark()

    def collected(self, step: CapturedStep) -> None:
        """Take the rows of a finished step, without those of sequences that have left since."""
        step.head.wait()
        self._in_flight -= step.rows
        pages = {slot: own for slot, (chunk, own) in step.pages.items() if not chunk.void}
        self.states.drain(int(step.head.array[0]), pages)


def make_states(
    plan: MemoryPlan, model: GpuDecoder, placement: Placement, *, streams: bool
) -> PageStates | None:
    """Return the source of states; None if no trainer wants features or no drafter reads them."""
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
