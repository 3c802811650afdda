"""The draft rows that a device verifies for a strategy, and the prompt rows that fit a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.schedule.scheduler import unpadded
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.recorded import RecordHeader
from tlt_server.speculation.sizes import AnySize, Sizes
from tlt_server.wire.records import StepContext, Strategy


class StepRows(NamedTuple):
    strategy: Strategy  # cut to what the device holds
    drafts: int  # rows, unless the trees have fewer nodes


Rows = NDArray[np.int64]


class Limits(Protocol):
    sizes: Sizes
    room: Callable[[int, int], int]  # as `Equipment.room`
    late: bool  # results arrive one step late

    def of(self, strategy: Strategy, requests: int, live: int, *, prompts: bool) -> StepRows: ...

    def choices(self, requests: int, live: int, *, prompts: bool) -> Rows:
        """Return the numbers of draft rows that a policy may request, ascending."""

    def read(self, context: StepContext, live: int, asked: Rows, drafted: Rows) -> Rows:
        """Return the rows that the target computes in steps with these requested and these
        available draft rows, padding included.
        """

    def budget(self, drafts: int, requests: int, live: int, *, prompts: bool) -> int:
        """Return the `Strategy.budget` that verifies this number of draft rows."""

    def ranked(self, acceptance_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return acceptance probabilities as the device compares them."""

    def seen(self, strategy: Strategy, live: int) -> int:
        """Return the number of requests whose trees the host sees; 0 if it sees none."""


class CpuLimits:
    def __init__(self, header: RecordHeader) -> None:
        self.sizes: Sizes = AnySize()
        self.room: Callable[[int, int], int] = unpadded
        self.late = False
        self._scratch = header.max_draft_rows

    def of(self, strategy: Strategy, requests: int, live: int, *, prompts: bool) -> StepRows:
        return StepRows(strategy, min(strategy.draft_rows(requests), self._scratch))

    def choices(self, requests: int, live: int, *, prompts: bool) -> Rows:
        return np.arange(1, self._scratch + 1)

    def read(self, context: StepContext, live: int, asked: Rows, drafted: Rows) -> Rows:
        return context.decoding + drafted + context.prefill_rows

    def budget(self, drafts: int, requests: int, live: int, *, prompts: bool) -> int:
        return drafts

    def ranked(self, acceptance_N: NDArray[np.float32]) -> NDArray[np.float32]:
        return acceptance_N

    def seen(self, strategy: Strategy, live: int) -> int:
        return live


class GpuLimits:
    """The limits of a GPU: a batch is padded to a bucket, and drafts use the padding's rows."""

    def __init__(self, header: RecordHeader) -> None:
        from tlt_server.engine.devices import DEVICES
        from tlt_server.engine.gpu.steps.buckets import MIN_DEPTH, Shapes

        halves = (DRAFTERS[name].half(header.device) for name in header.drafters)
        deepest = max(MIN_DEPTH, *(half.deepest for half in halves))
        shapes = Shapes(header.max_running, deepest, DEVICES.resolve(header.device).prompts)
        self.sizes: Sizes = shapes
        self.room: Callable[[int, int], int] = shapes.room
        self.late = True
        self._step = shapes.step

    def of(self, strategy: Strategy, requests: int, live: int, *, prompts: bool) -> StepRows:
        shape = self._step(requests, strategy, 0, int(prompts))
        drafts = shape.extend.decode_rows - live if shape.draft else 0
        return StepRows(shape.strategy, drafts)

    def choices(self, requests: int, live: int, *, prompts: bool) -> Rows:
        return self.sizes.decode_rows(requests, prompts=prompts)[1:] - live

    def read(self, context: StepContext, live: int, asked: Rows, drafted: Rows) -> Rows:
        batch = self.sizes.batch(context.decoding, prompts=context.prefill_rows > 0)
        return self.sizes.computed(np.maximum(batch, live + asked), context.prefill_rows)

    def budget(self, drafts: int, requests: int, live: int, *, prompts: bool) -> int:
        return drafts + live - self.sizes.batch(requests, prompts=prompts)

    def ranked(self, acceptance_N: NDArray[np.float32]) -> NDArray[np.float32]:
        import torch

        from tlt_kernels.gpu.priority import compared

        found_N: NDArray[np.float32] = compared(torch.from_numpy(acceptance_N)).numpy()
        return found_N

    def seen(self, strategy: Strategy, live: int) -> int:
        from tlt_kernels.gpu.branches import columns
        from tlt_server.engine.gpu.steps.tree_samples import MAX_NODES

        own = DRAFTERS[strategy.drafter].needs_weights
        depth, width = strategy.depth, strategy.width
        return min(live, MAX_NODES // (columns(depth, width) if own else depth * width))


def limits_of(header: RecordHeader) -> Limits:
    return CpuLimits(header) if header.device == "cpu" else GpuLimits(header)
