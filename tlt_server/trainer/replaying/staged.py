"""Recorded responses in the form that drafters read, and the positions to draft from.

Legend: N staged responses, T tokens of all of them, B roots of a batch, D depths, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache
from tlt_server.samples.samples import Responses
from tlt_server.speculation.batch import DraftBatch
from tlt_server.trainer.target.prefill import TextPages

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
