"""Draft trees of sampled steps, copied to the host for the acceptance estimate of their drafter.

A copy is queued after the draft pass, into pinned memory, and read with the step's outcome, so it
costs the device a few microseconds and the host no wait. Legend: B requests, C columns, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tlt_kernels.gpu.tensors import Nodes
from tlt_server.engine.gpu.steps.ring import PinnedBuffer, PinnedRing
from tlt_server.speculation.knowledge import Drafted
from tlt_server.speculation.node_table import candidates_of

EVERY = 8  # the trees of one in 8 steps with drafts are copied
MAX_NODES = 4096  # limit of one copy, which has the first requests of a larger batch


class TreeSample(NamedTuple):
    """The trees of a step, on their way to the host."""

    buffer: PinnedBuffer
    requests: int
    columns: int
    own_columns: int  # branches stand after them
    whole: bool  # all requests of the batch are in it
    detailed: bool  # with tokens and cells


class TreeSampler:
    """Copies the trees of one in `every` steps, `most` nodes at a time; `detailed`: with the tokens
    and cells that a recording needs.
    """

    def __init__(
        self,
        ring: int,
        *,
        pinned: bool,
        every: int = EVERY,
        most: int = MAX_NODES,
        detailed: bool = False,
    ) -> None:
        self._every, self._most, self._detailed = every, most, detailed
        self._buffers = PinnedRing(ring, (5 if detailed else 3) * most, pinned=pinned)
        self._steps = 0

    def launch(self, nodes: Nodes, requests: int, own_columns: int) -> TreeSample | None:
        """Queue a copy of the trees of the first `requests` of a batch, if a sample is due. Columns
        from `own_columns` on are branches.
        """
        self._steps += 1
        columns = nodes.acceptance_BC.shape[1]
        some = min(requests, self._most // columns)
        if (self._steps - 1) % self._every or not some:
            return None
        buffer, count = self._buffers.take(), some * columns
        parts = [nodes.parent_BC, nodes.depth_BC, nodes.acceptance_BC.view(torch.int32)]
        if self._detailed:
            parts += [nodes.token_BC, nodes.cell_BC]
        for i, part in enumerate(parts):
            buffer.tensor[i * count : (i + 1) * count].copy_(
                part[:some].reshape(-1), non_blocking=True
            )
        buffer.mark()
        whole = some == requests
        return TreeSample(buffer, some, columns, own_columns, whole, self._detailed)


def read(sample: TreeSample, verified: int) -> Drafted:
    """Return the trees. `verified`: the number of draft rows of the step, which were the likeliest
    nodes.
    """
    sample.buffer.wait()
    count = sample.requests * sample.columns
    size = 5 * count if sample.detailed else 3 * count
    parent_N, depth_N, bits_N, *details = sample.buffer.array[:size].reshape(-1, count)
    acceptance_N = bits_N.view(np.float32)
    candidates = candidates_of(
        sample.columns, sample.own_columns, parent_N, depth_N, acceptance_N, *details
    )
    best = np.sort(candidates.acceptance_N)[::-1][:verified]
    return Drafted(candidates, sample.requests, float(best.sum()) if sample.whole else 0.0)
