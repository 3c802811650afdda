"""Draft trees of some steps, copied to the host for the outlook of their drafter.

A copy is queued after the draft pass, into pinned memory, and read with the step's outcome, so it
costs the device a few microseconds and the host no wait. Legend: B requests, C columns, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tlt_kernels.gpu.tensors import Nodes
from tlt_server.engine.gpu.ring import PinnedBuffer, PinnedRing
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.branches import RANK
from tlt_server.speculation.knowledge import Drafted

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
    """Copies the trees of one in `every` steps, `most` nodes at a time; `detailed`: with tokens and
    cells, which a recording needs.
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
        """Queue a copy of the trees of the first `requests` of a batch, if it is their turn. Their
        columns from `own_columns` on have branches.
        """
        self._steps += 1
        columns = nodes.survival_BC.shape[1]
        some = min(requests, self._most // columns)
        if (self._steps - 1) % self._every or not some:
            return None
        buffer, count = self._buffers.take(), some * columns
        parts = [nodes.parent_BC, nodes.depth_BC, nodes.survival_BC.view(torch.int32)]
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
    """Return the trees. `verified`: draft rows of the step, which were the most likely nodes."""
    sample.buffer.wait()
    count = sample.requests * sample.columns
    size = 5 * count if sample.detailed else 3 * count
    parent_N, depth_N, bits_N, *details = sample.buffer.array[:size].reshape(-1, count)
    survival_N = bits_N.view(np.float32)
    live = np.flatnonzero(survival_N >= 0)
    request_N = (live // sample.columns).astype(np.int32)
    index_N = np.full(count, -1, np.int32)
    index_N[live] = np.arange(len(live), dtype=np.int32)
    above = parent_N[live]
    parent = np.where(above >= 0, index_N[request_N * sample.columns + above], -1)
    survival = survival_N[live].copy()
    token, cell = [part[live] for part in details] or [parent * 0, np.zeros(0, np.int32)]
    own_N = live % sample.columns < sample.own_columns
    ranks = np.full(len(live), RANK, np.int32)
    ranks[own_N] = _ranks(request_N[own_N], parent[own_N])
    candidates = Candidates(request_N, parent, token, depth_N[live].copy(), ranks, survival, cell)
    best = np.sort(survival)[::-1][:verified]
    return Drafted(candidates, sample.requests, float(best.sum()) if sample.whole else 0.0)


def _ranks(request_N: np.ndarray, parent_N: np.ndarray) -> np.ndarray:
    """Return the place of each node among its siblings, which stand in order of rank."""
    family_N = np.where(parent_N >= 0, parent_N + request_N.max(initial=0) + 1, request_N)
    order = np.argsort(family_N, kind="stable")
    ordered = family_N[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    first = np.repeat(starts, np.diff(np.append(starts, len(ordered))))
    rank_N = np.empty(len(parent_N), np.int32)
    rank_N[order] = np.arange(len(ordered)) - first
    return rank_N
