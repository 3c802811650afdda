"""Features of the target over recorded responses, from where there are some.

A drafter reads the target's features at every position that a response has committed. They are
recomputed here by the project's own model on the CPU: in strict numerics a row's bits depend on its
prefix only, so a few large prefill chunks give the bits that serving had. A cache of captured
features is another `FeatureSource`.

Legend: T tokens of several responses, one response after another, R rows, P pages, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache, Rows
from tlt_server.models.decoder import Decoder
from tlt_server.samples.samples import Responses

CHUNK = 512  # rows of one forward


class FeatureSource(Protocol):
    @property
    def width(self) -> int:
        """Return F."""

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        """Return the features of all tokens of these responses, [T, F]."""


class TextPages:
    """TextPages of several texts that share none: those of a text lie one after another."""

    def __init__(self, lengths: Sequence[int], page_size: int) -> None:
        self.page_size = page_size
        self.length_N = np.array(lengths, np.int64)
        count_N = -(-self.length_N // page_size)
        self.first_N = np.cumsum(count_N) - count_N
        self.count = int(count_N.sum())
        # A page beyond a text's own is never read.
        columns = np.arange(int(count_N.max(initial=1)))
        self.table_NP = np.where(columns < count_N[:, None], self.first_N[:, None] + columns, 0)
        self.table_NP = self.table_NP.astype(np.int32)

    def kv_slots(self) -> NDArray[np.int64]:
        """Return the KV slot of every token, text after text."""
        starts_N = np.cumsum(self.length_N) - self.length_N
        place_T = np.arange(int(self.length_N.sum())) - np.repeat(starts_N, self.length_N)
        return np.repeat(self.first_N * self.page_size, self.length_N) + place_T


class RecomputedFeatures:
    """Features by a prefill of the recorded tokens. The target is loaded with the layers that the
    drafter reads.
    """

    def __init__(self, target: Decoder) -> None:
        self._target = target
        self._cache = target.make_cache(1, target.page_size, 0)

    @property
    def width(self) -> int:
        return self._target.feature_width

    @torch.inference_mode()
    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        texts = [responses.tokens(n) for n in chosen]
        pages = TextPages([len(text) for text in texts], self._target.page_size)
        if self._cache.pages < pages.count:
            self._cache = self._target.make_cache(pages.count, self._target.page_size, 0)
        found = [
            self._target.forward(rows, self._cache).features_RF
            for rows in _prefills(texts, pages, self._cache)
        ]
        return torch.cat(found)


def _prefills(
    texts: Sequence[NDArray[np.int32]], pages: TextPages, cache: KVCache
) -> Iterator[Rows]:
    """Yield the rows of each forward: the next `CHUNK` tokens, whichever texts they are of."""
    token_T = np.concatenate(texts).astype(np.int64)
    kv_slot_T = pages.kv_slots()
    text_T = np.repeat(np.arange(len(texts)), pages.length_N)
    starts_N = np.cumsum(pages.length_N) - pages.length_N
    position_T = np.arange(len(token_T)) - starts_N[text_T]
    for start in range(0, len(token_T), CHUNK):
        part = slice(start, start + CHUNK)
        first, last = int(text_T[part][0]), int(text_T[part][-1])
        base_B = np.minimum(
            pages.length_N[first : last + 1], start + CHUNK - starts_N[first : last + 1]
        )
        rows = len(token_T[part])
        yield Rows(
            token_R=torch.from_numpy(token_T[part]),
            position_R=torch.from_numpy(position_T[part]),
            kv_slot_R=torch.from_numpy(kv_slot_T[part]),
            request_R=torch.from_numpy((text_T[part] - first).astype(np.int32)),
            base_B=torch.from_numpy(base_B.astype(np.int32)),
            page_table_BP=torch.from_numpy(pages.table_NP[first : last + 1]),
            path_RD=torch.zeros(rows, 0, dtype=torch.int32),
        )
