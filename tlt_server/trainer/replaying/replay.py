"""Drafts again at roots of recorded responses, with the serving functions.

A response is fixed by target, prompt and seed, with any drafter. So the accepted drafts of any
drafter at a root are known without the target: the longest path of its tree that the response
follows. The drafter, its tree builder and the noise are the engine's on the drafter's device, and
the calibration is frozen. Each root uses its own best nodes, so counts do not depend on the batch.

Legend: B roots of a batch, D depths, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_server.models.draft_checkpoint import Served
from tlt_server.registry import load_object
from tlt_server.speculation.accept import accepted_drafts, on_path
from tlt_server.speculation.branches import Proposing
from tlt_server.speculation.drafters import DRAFTERS, drafter_in
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.speculation.tree import select
from tlt_server.trainer.replaying.staged import Roots, StagedResponses
from tlt_server.wire.records import Strategy

MAX_ROOTS = 256  # roots drafted from at once, at most
GPU_ROOTS = 128  # the same on a GPU, where requests wait for the end of a proposal
DRAFT_ROWS = 8192  # draft rows of one proposal
UNBOUNDED = 2**30  # draft rows of a batch in which no tree is cut for the sake of another


@dataclass(frozen=True)
class ReplayedDrafter:
    """A drafter with the calibration of its directory."""

    label: str  # in figures
    kind: str  # in `DRAFTERS`
    weights: DraftWeights
    device: str = "cpu"  # in `TREES`

    @classmethod
    def load(
        cls, directory: Path, target: Served, label: str = "", device: str = "cpu"
    ) -> ReplayedDrafter:
        """`target`: on the same device. `ModelError` if the drafter does not fit it."""
        loader = find_loader(directory, device)
        network = loader.empty(directory, target)
        loader.fill(network, directory)
        weights = DraftWeights(network, loader.calibration(directory))  # type: ignore[arg-type]
        return cls(label or str(directory), drafter_in(directory), weights, device)

    def vocabulary(self) -> NDArray[np.int64]:
        """Return the target's ids of all draftable tokens."""
        ids: NDArray[np.int64] = self.weights.network.target_ids.cpu().numpy()
        return ids


def _on_cpu(drafter: ReplayedDrafter, staged: StagedResponses) -> Proposing:
    setup = DraftSetup(
        drafter.kind, staged.cache, drafter.weights, max_requests=MAX_ROOTS, max_rows=DRAFT_ROWS
    )
    made: Proposing = load_object(DRAFTERS[drafter.kind].cpu.implementation).make(setup)
    return made


def _on_gpu(drafter: ReplayedDrafter, staged: StagedResponses) -> Proposing:
    made: Proposing = load_object("tlt_server.trainer.replaying.gpu_trees:GpuTrees")(
        staged, drafter.weights, max_requests=MAX_ROOTS, max_rows=DRAFT_ROWS
    )
    return made


TREES: dict[str, Callable[[ReplayedDrafter, StagedResponses], Proposing]] = {
    "cpu": _on_cpu,
    "cuda": _on_gpu,
}


class DraftReplay:
    """One drafter on staged responses."""

    def __init__(self, drafter: ReplayedDrafter, staged: StagedResponses) -> None:
        self.drafter, self.staged = drafter, staged
        self._drafts = TREES[drafter.device](drafter, staged)

    @property
    def all_at_once(self) -> bool:
        """Return True if it is faster to draft from all positions of a response before walking
        it.
        """
        return self.drafter.device == "cuda"

    def accepted(
        self, roots: Roots, depth: int, width: int, *, floored: bool = True
    ) -> NDArray[np.int32]:
        """Return how many drafts of each root's tree the response follows, [B].

        `floored`: leave out nodes that serving does not expand, as their acceptance probability is
        too low. False uses the whole tree, which contains the chain of any recorded number of rows.
        """
        parts = self._at_once(roots, depth, width)
        found = [self._accepted(part, depth, width, floored) for part in parts]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def calibrate(self, roots: Roots, depth: int, width: int) -> None:
        """Correct the drafter's calibration table by whole trees from these roots."""
        for part in self._at_once(roots, depth, width):
            batch = self.staged.batch(part)
            candidates = self._drafts.propose(batch, Strategy(self.drafter.kind, depth, width, 1))
            follow_BD = self.staged.follow(part, depth)
            self._drafts.observe(batch, candidates, on_path(candidates, follow_BD).astype(np.int8))

    def _accepted(self, roots: Roots, depth: int, width: int, floored: bool) -> NDArray[np.int32]:
        batch = self.staged.batch(roots)
        shape = Strategy(self.drafter.kind, depth, width, 1, UNBOUNDED if floored else 0)
        candidates = self._drafts.propose(batch, shape)
        chosen = select(candidates, len(batch), len(candidates), roots.rows_B - 1)
        own_N = on_path(candidates, self.staged.follow(roots, depth))
        return accepted_drafts(candidates, chosen.node_M, own_N, len(batch))

    def _at_once(self, roots: Roots, depth: int, width: int) -> Iterator[Roots]:
        """Cut roots into parts that fit in one proposal of such trees."""
        roots_at_once = GPU_ROOTS if self.all_at_once else MAX_ROOTS
        most = max(1, min(roots_at_once, DRAFT_ROWS // max(1, width * (depth - 1))))
        for first in range(0, len(roots.position_B), most):
            yield roots.part(slice(first, first + most))
