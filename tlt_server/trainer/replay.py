"""Drafts again at roots of recorded responses, with the functions that serve.

A response is fixed by target, prompt and seed, with any drafter. So what a drafter would have had
accepted at a root is known without the target: the longest path of its tree that the response
follows. The drafter, its tree builder and the noise are the CPU engine's own, and the calibration
is frozen. Each root takes its own best nodes, so no count depends on what is drafted along with it.

Legend: N staged responses, T tokens, B roots of a batch, D depths, M chosen nodes, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache
from tlt_server.models.decoder import Decoder
from tlt_server.records import Strategy
from tlt_server.registry import load_object
from tlt_server.samples.samples import Responses
from tlt_server.speculation.accept import accept
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.drafters import DRAFTERS, drafter_in
from tlt_server.speculation.drafters.cpu import CpuDrafter, DraftSetup, DraftWeights
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.speculation.tree import Selection, select
from tlt_server.trainer.prefill import TextPages

MAX_ROOTS = 256  # roots drafted from at once
DRAFT_ROWS = 8192  # draft rows of one proposal
UNBOUNDED = 2**30  # draft rows of a batch in which no tree is cut for the sake of another


@dataclass(frozen=True)
class ReplayedDrafter:
    """A drafter with the calibration that its directory holds."""

    label: str  # in figures
    kind: str  # in `DRAFTERS`
    weights: DraftWeights

    @classmethod
    def load(cls, directory: Path, target: Decoder, label: str = "") -> ReplayedDrafter:
        """`ModelError` when it does not fit the target."""
        loader = find_loader(directory, "cpu")
        network = loader.empty(directory, target)
        loader.fill(network, directory)
        weights = DraftWeights(network, loader.calibration(directory))
        return cls(label or str(directory), drafter_in(directory), weights)

    def vocabulary(self) -> NDArray[np.int64]:
        """Return the target's ids of all tokens that it can draft."""
        ids: NDArray[np.int64] = self.weights.network.target_ids.cpu().numpy()
        return ids


class Roots(NamedTuple):
    """Positions to draft from. The last token known is the one at the root."""

    response_B: NDArray[np.int64]  # index into the staged responses
    position_B: NDArray[np.int64]
    rows_B: NDArray[np.int32]  # rows to verify, the root included

    def part(self, chosen: slice | NDArray[np.int64]) -> Roots:
        return Roots(self.response_B[chosen], self.position_B[chosen], self.rows_B[chosen])


class StagedResponses:
    """Recorded responses as drafters read them: tokens, pages, and features in a cache that all of
    them share.
    """

    def __init__(self, width: int, pages: int, page_size: int) -> None:
        """`width`: F."""
        self.cache = KVCache(
            layers=0,
            pages=pages,
            page_size=page_size,
            scratch=0,
            kv_heads=1,
            head_dim=1,
            features=width,
        )

    def stage(self, responses: Responses, chosen: Sequence[int], features_TF: Tensor) -> None:
        """Take these responses instead of those before."""
        chosen_N = np.array(chosen, np.int64)
        texts = [responses.tokens(n) for n in chosen]
        self.texts = texts
        self.length_N = np.array([len(text) for text in texts], np.int64)
        self.start_N = np.cumsum(self.length_N) - self.length_N
        self.token_T = np.concatenate(texts).astype(np.int32)
        self.prompt_len_N = responses.prompt_len_N[chosen_N]
        self.seed_N = responses.seed_N[chosen_N]
        self.temperature_N = responses.temperature_N[chosen_N]
        self.last_N = self.prompt_len_N + responses.max_tokens_N[chosen_N].astype(np.int64)
        pages = TextPages(self.length_N.tolist(), self.cache.page_size)
        assert pages.count <= self.cache.pages, "the cache was made for fewer tokens"
        self.table_NP = pages.table_NP
        self.cache.reuse(range(self.cache.pages))
        self.cache.features_SF.numpy()[pages.kv_slots()] = features_TF.numpy()

    def batch(self, roots: Roots) -> DraftBatch:
        """Return what a drafter sees."""
        n_B, position_B = roots.response_B, roots.position_B
        pairs = zip(n_B.tolist(), position_B.tolist(), strict=True)
        names = [str(n) for n in n_B.tolist()]
        return DraftBatch(
            ids=names,
            group_ids=names,
            tokens=[self.texts[n][: position + 1] for n, position in pairs],
            prompt_len_B=self.prompt_len_N[n_B],
            page_table_BP=self.table_NP[n_B],
            seed_B=self.seed_N[n_B],
            temperature_B=self.temperature_N[n_B],
            # As in serving: the last token that max_tokens permits is never a draft.
            max_depth_B=np.maximum(0, self.last_N[n_B] - position_B - 2).astype(np.int32),
        )

    def follow(self, roots: Roots, depth: int) -> NDArray[np.int32]:
        """Return the responses' tokens after the roots, [B, depth + 1], -1 after the last one."""
        place_BD = roots.position_B[:, None] + 1 + np.arange(depth + 1)
        inside_BD = place_BD < self.length_N[roots.response_B][:, None]
        at_BD = np.where(inside_BD, self.start_N[roots.response_B][:, None] + place_BD, 0)
        return np.where(inside_BD, self.token_T[at_BD], np.int32(-1))


class DraftReplay:
    """One drafter on staged responses."""

    def __init__(self, drafter: ReplayedDrafter, staged: StagedResponses) -> None:
        self.drafter, self.staged = drafter, staged
        setup = DraftSetup(
            staged.cache, drafter.weights, max_requests=MAX_ROOTS, max_rows=DRAFT_ROWS
        )
        made: CpuDrafter = load_object(DRAFTERS[drafter.kind].cpu.implementation).make(setup)
        self._drafts = made

    def accepted(
        self, roots: Roots, depth: int, width: int, *, floored: bool = True
    ) -> NDArray[np.int32]:
        """Return how many drafts of each root's tree the response follows, [B].

        `floored`: leave out what serving does not expand, as it hardly survives. False gives the
        whole tree, which has the chain of any recorded number of rows.
        """
        most = max(1, min(MAX_ROOTS, DRAFT_ROWS // max(1, width * (depth - 1))))
        parts = [slice(i, i + most) for i in range(0, len(roots.position_B), most)]
        found = [self._accepted(roots.part(part), depth, width, floored) for part in parts]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def calibrate(self, roots: Roots, depth: int, width: int) -> None:
        """Correct the drafter's calibration table by whole trees from these roots."""
        batch = self.staged.batch(roots)
        candidates = self._drafts.propose(batch, Strategy(self.drafter.kind, depth, width, 1))
        follow_BD = self.staged.follow(roots, depth)
        self._drafts.observe(batch, candidates, on_path(candidates, follow_BD))

    def _accepted(self, roots: Roots, depth: int, width: int, floored: bool) -> NDArray[np.int32]:
        batch = self.staged.batch(roots)
        shape = Strategy(self.drafter.kind, depth, width, 1, UNBOUNDED if floored else 0)
        candidates = self._drafts.propose(batch, shape)
        chosen = select(candidates, len(batch), len(candidates), roots.rows_B - 1)
        return followed(candidates, chosen, self.staged.follow(roots, depth))


def on_path(candidates: Candidates, follow_BD: NDArray[np.int32]) -> NDArray[np.int8]:
    """Tell of each node whether the response has it, too, [N]. follow_BD: as for `followed`."""
    request_N, depth_N, parent_N = candidates.request_N, candidates.depth_N, candidates.parent_N
    right_N = candidates.token_N == follow_BD[request_N, depth_N - 1]
    for depth in range(2, int(depth_N.max(initial=1)) + 1):
        at = np.flatnonzero(depth_N == depth)
        right_N[at] &= right_N[parent_N[at]]
    return right_N.astype(np.int8)


def followed(
    candidates: Candidates, chosen: Selection, follow_BD: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the accepted drafts of each request, [B], by the walk of `speculation.accept`.
    follow_BD: the target's tokens after the roots.
    """
    requests = len(follow_BD)
    node_M, count_B = chosen.node_M, chosen.count_B.astype(np.int64)
    start_B = np.cumsum(count_B) - count_B + np.arange(requests)
    request_M = candidates.request_N[node_M].astype(np.int64)
    row_M = np.arange(len(node_M)) + request_M + 1
    rows = len(node_M) + requests
    parent_R, token_R = np.full(rows, -1, np.int32), np.full(rows, -1, np.int32)
    sampled_R = np.empty(rows, np.int32)
    token_R[row_M] = candidates.token_N[node_M]
    parent_M = chosen.parent_M
    parent_R[row_M] = np.where(parent_M < 0, start_B[request_M], row_M[np.maximum(parent_M, 0)])
    sampled_R[start_B] = follow_BD[:, 0]
    sampled_R[row_M] = follow_BD[request_M, candidates.depth_N[node_M]]
    walk = accept(
        start_B.astype(np.int32), (count_B + 1).astype(np.int32), parent_R, token_R, sampled_R
    )
    return walk.length_B
