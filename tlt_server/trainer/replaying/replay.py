"""Recorded responses in the form that drafters read, and drafts again at their roots, with the
serving functions.

A response is fixed by target, prompt and seed, with any drafter. So the accepted drafts of any
drafter at a root are known without the target: the longest path of its tree that the response
follows. The drafter, its tree builder and the noise are the engine's on the drafter's device, and
the calibration is frozen. Each root uses its own best nodes, so counts do not depend on the batch.

Legend: N staged responses or nodes, T tokens of all of them, B roots of a batch, D depths, F
features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache
from tlt_server.models.draft_checkpoint import Served
from tlt_server.registry import load_object
from tlt_server.samples.samples import Responses
from tlt_server.settings.server import QuantizationName
from tlt_server.speculation.accept import accepted_drafts, on_path
from tlt_server.speculation.batch import DraftBatch
from tlt_server.speculation.branches import Proposing
from tlt_server.speculation.drafters import DRAFTERS, drafter_in, find_loader
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.speculation.tree import select
from tlt_server.trainer.target.prefill import TextPages
from tlt_server.wire.records import Strategy

PAGE_SIZE = 16  # tokens, as of a GPU's kernels; no bit depends on it


class Roots(NamedTuple):
    """Positions to draft from. The root's token is the last known one."""

    response_B: NDArray[np.int64]  # index into the staged responses
    position_B: NDArray[np.int64]
    rows_B: NDArray[np.int32]  # rows to verify, the root included

    def part(self, chosen: slice | NDArray[np.int64]) -> Roots:
        return Roots(self.response_B[chosen], self.position_B[chosen], self.rows_B[chosen])


class StagedResponses:
    """Recorded responses in the form that drafters read: tokens, pages, and a shared cache of
    features.
    """

    def __init__(self, width: int, pages: int) -> None:
        """`width`: F."""
        self.number = 0  # how many times responses were staged
        self.cache = KVCache(
            layers=0,
            pages=pages,
            page_size=PAGE_SIZE,
            scratch=0,
            kv_heads=1,
            head_dim=1,
            features=width,
        )

    def stage(self, responses: Responses, chosen: Sequence[int], features_TF: Tensor) -> None:
        """Replace the staged responses by these."""
        chosen_N = np.array(chosen, np.int64)
        self._responses, self._chosen_N = responses, chosen_N
        self.prompt_len_N = responses.prompt_len_N[chosen_N]
        pages = TextPages([responses.tokens(n) for n in chosen], PAGE_SIZE)
        assert pages.count <= self.cache.pages, "the cache was made for fewer tokens"
        self.token_T, self.position_T, self.kv_slot_T = (
            pages.token_T,
            pages.position_T,
            pages.kv_slot_T,
        )
        self.length_N, self.start_N, self.table_NP = pages.length_N, pages.start_N, pages.table_NP
        self.number += 1
        self.cache.reuse(range(self.cache.pages))
        self.cache.features_SF.numpy()[self.kv_slot_T] = features_TF.numpy()

    def batch(self, roots: Roots) -> DraftBatch:
        """Return the drafter's input at these roots."""
        return DraftBatch.of(
            self._responses,
            self._chosen_N[roots.response_B],
            roots.position_B,
            self.table_NP[roots.response_B],
        )

    def follow(self, roots: Roots, depth: int) -> NDArray[np.int32]:
        """Return the responses' tokens after the roots, [B, depth], -1 after the last one."""
        return self._responses.after(self._chosen_N[roots.response_B], roots.position_B, depth)


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
        cls,
        directory: Path,
        target: Served,
        label: str = "",
        device: str = "cpu",
        quantization: QuantizationName = "none",
    ) -> ReplayedDrafter:
        """`target`: on the same device. `ModelError` if the drafter does not fit it."""
        loader = find_loader(directory, device)
        network = loader.empty(directory, target, quantization=quantization)
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
