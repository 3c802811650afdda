"""Masks of structured outputs for a step on a GPU.

A mask depends on the previous step's tokens and on the drafts after them, and the device knows both
first. So a step with such a request is launched in two halves: while the first half computes
logits, the host reads the newest tokens and the trees, lets each sequence's matcher fill the masks
of its rows, and uploads them; the second half samples. The slow twin is the CPU's sampler, which
asks row by row. A row whose mask takes too long is left out of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.gpu.structure import DRAFT_LEFT_OUT, ENTRY_LEFT_OUT, NO_MASK
from tlt_server.engine.gpu.steps.extend import Extend
from tlt_server.engine.gpu.steps.ring import PinnedBuffer, PinnedRing
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.engine.schedule.batch import Chunk
from tlt_server.engine.schedule.sequence import Sequence as EngineSequence

STEPS = 2  # steps whose buffers may be in use


class StructureMasks:
    def __init__(
        self,
        state: DeviceState,
        *,
        pinned: bool,
        wait: Callable[[PinnedBuffer], None] | None = None,
    ) -> None:
        """Buffers are allocated at first use. `wait`: as in `PinnedRing`."""
        self._state, self._ring = state, partial(PinnedRing, STEPS, pinned=pinned, wait=wait)

    @cached_property
    def _trees(self) -> PinnedRing:
        return self._ring(4 * len(self._state.logits_SV))

    @cached_property
    def _masks(self) -> PinnedRing:
        return self._ring(len(self._state.masks.whole))

    def copy_trees(self, extend: Extend) -> PinnedBuffer:
        """Queue a copy of a step's selected trees."""
        key, trees, rows = extend.key, extend.trees, extend.rows
        buffer, at = self._trees.take(), 0
        for values, count in (
            (trees.root_E, key.batch),
            (trees.count_E, key.batch),
            (rows.token_R, key.decode_rows),
            (rows.parent_R, key.decode_rows),
        ):
            buffer.tensor[at : at + count].copy_(values[:count], non_blocking=True)
            at += count
        buffer.mark()
        return buffer

    def upload(
        self,
        extend: Extend,
        trees: PinnedBuffer,
        entries: Sequence[tuple[int, Chunk]],
        newest: Mapping[EngineSequence, list[int]],
    ) -> NDArray[np.int32]:
        """Fill and upload the masks of a step whose `trees` were copied and whose first half is
        running. Return the words. `newest`: the uncommitted tokens of earlier steps.
        """
        device = self._state.masks
        samples, words = len(device.mask_S), device.mask_MW.shape[1]
        buffer = self._masks.take()
        mask_S = buffer.array[:samples]
        mask_MW = buffer.array[samples:].reshape(samples, words)
        mask_S.fill(NO_MASK)
        used = 0
        paths = _Paths(extend, trees)
        for entry, work in entries:
            structure = work.sequence.state.structure
            if structure is None or not work.samples:
                continue
            known = newest.get(work.sequence, [])
            for sample, path in paths.of(entry):
                if structure.fill([*known, *path], mask_MW[used], certain=len(known)):
                    mask_S[sample] = used
                    used += 1
                else:
                    mask_S[sample] = DRAFT_LEFT_OUT if path else ENTRY_LEFT_OUT - entry
        count = samples + used * words
        device.whole[:count].copy_(buffer.tensor[:count], non_blocking=True)
        buffer.mark()
        return buffer.array[:count]


class _Paths:
    """The samples of an entry, each with the draft tokens up to its row."""

    def __init__(self, extend: Extend, trees: PinnedBuffer) -> None:
        batch, self._rows = extend.key.batch, extend.key.decode_rows
        trees.wait()
        values = trees.array[: 2 * (batch + self._rows)].tolist()
        self._root_B, self._count_B = values[:batch], values[batch : 2 * batch]
        self._token_V = values[2 * batch : 2 * batch + self._rows]
        self._parent_V = values[2 * batch + self._rows :]

    def of(self, entry: int) -> list[tuple[int, list[int]]]:
        batch = len(self._root_B)
        if entry >= batch:
            return [(self._rows + entry - batch, [])]
        root, found = self._root_B[entry], dict[int, list[int]]()
        for row in range(root, root + self._count_B[entry]):
            above = found.get(self._parent_V[row], [])
            found[row] = [] if row == root else [*above, self._token_V[row]]
        return [*found.items()]
